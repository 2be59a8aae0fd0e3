"""`--loader bcc`: starts the recorder, and compiles the programs for it with BCC, a process beside it that needs root.

    python3 -I bcc_helper.py SOURCE RECORDER ARGUMENTS...

The recorder takes this process's place and number. It hands its maps over a socket (`--programs-fd`) and gets a descriptor for
each program (tracer/recorder/handed.c). What is read: the source, the kernel's headers, the formats in tracefs. Nothing of this
project is imported, since a device has only this file and the source.
"""

import ctypes
import json
import os
import platform
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

FAILED = 125
STDERR = 2
MOST_BYTES, MOST_MAPS, MOST_SAID, MOST_FILES = 1 << 17, 64, 2000, 1 << 20
DIE_WITH_PARENT = 1
DIST_PACKAGES = "/usr/lib/python3/dist-packages"
NO_FIELD = 1 << 20
KERNEL_FIELD = re.compile(r"\b(?:KERNEL_AT|KERNEL_READ|HAS_FIELD)\((\w+), (\w+)")
TASK_FIELD = re.compile(r"\btask_counter\((\w+)\)")
USED_FIELD = re.compile(r"\bFIELD(?:_AT)?\(ctx, (\w+), (\w+)")
TRACEPOINT_FIELD = re.compile(r"field:(__data_loc )?.*?(\w+)(?:\[\d*\])?;\s*offset:(\d+);")
TRACEPOINTS = {
    "mm_filemap_op_page_cache_range": ("mm_filemap_map_pages",),
    "mm_filemap_op_page_cache": ("mm_filemap_add_to_page_cache",),
    "block_rq": ("block_io_start", "block_rq_issue"),
    "cpu": ("cpu_frequency",),
}
"""Record in bpf/compat.h → the tracepoints that have it; others have their own name."""
HEADERS = ("sched", "fs", "fdtable", "blk-mq")
VARYING_FIELDS: dict[tuple[str, str], Callable[[tuple[int, ...]], bool]] = {
    ("task_struct", "cpu"): lambda version: version < (5, 16),
    ("thread_info", "cpu"): lambda version: version >= (5, 16),
    ("request", "rq_disk"): lambda version: version < (5, 17),
    ("request_queue", "disk"): lambda version: version >= (5, 15),
}
"""Members that some kernels lack → whether a version has them: headers cannot be asked."""


def launcher_words(source: Path) -> list[str]:
    """Words in front of a recorder's command line that have the programs compiled from `source`; isolated from its folder."""
    return [sys.executable, "-I", __file__, str(source)]


def main(source: str, *command: str) -> NoReturn:
    """Become the recorder; a child process serves it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    recorder = os.getpid()
    if not os.fork():
        serve_requests(stand_apart(ours.detach(), recorder), source)
        os._exit(0)
    os.set_inheritable(theirs.fileno(), True)
    try:
        os.execvp(command[0], [command[0], "--programs-fd", str(theirs.fileno()), *command[1:]])
    except OSError as error:
        print(f"moescope: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(FAILED)


def stand_apart(link: int, recorder: int) -> socket.socket:
    """The socket, of a process that ends with the recorder, and leaves alone its signals, pipes and output."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != recorder:
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(link, STDERR + 1)
    os.closerange(STDERR + 2, MOST_FILES)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), STDERR)
    return socket.socket(fileno=STDERR + 1)


def serve_requests(link: socket.socket, source: str) -> None:
    """Compile, and load each program that is asked for, until the recorder ends."""
    text, maps, _, _ = socket.recv_fds(link, MOST_BYTES, MOST_MAPS)
    try:
        module = compile_module(Path(source).resolve(), json.loads(text), maps)
    except Exception as error:
        link.send(f"-BCC cannot compile the programs: {error_text(error)}".encode())
        return
    link.send(b"+")
    while words := link.recv(MOST_BYTES).split():
        os.truncate(STDERR, 0)
        try:
            module.load_func(words[0], int(words[1]), attach_type=int(words[2]) or -1)
        except Exception as error:
            link.send(f"-{error_text(error)}".encode())
            continue
        program = module.funcs.pop(words[0]).fd
        socket.send_fds(link, [b"+"], [program])
        os.close(program)


def error_text(error: Exception) -> str:
    """The end of what BCC, the compiler or the verifier printed; else the error's own text."""
    size = os.fstat(STDERR).st_size
    said = os.pread(STDERR, MOST_SAID, max(0, size - MOST_SAID)).decode(errors="replace").strip("\0\n ")
    return said or " ".join(str(error).split())


def compile_module(source: Path, request: dict[str, Any], maps: list[int]) -> Any:
    """The compiled module, whose programs are not loaded."""
    bcc = import_bcc()
    texts = "".join(path.read_text() for path in sorted(source.parent.glob("*.bpf.c")))
    flags = ["-DLOADER_BCC", f"-I{source.parent}", *(["-DBUFFER_PERF"] if request["perf"] else [])]
    flags += [f"-DMAP_FD_{name}={fd}" for name, fd in zip(request["maps"], maps, strict=True)]
    flags += kernel_offsets(texts, request["offsets"]) + tracepoint_offsets(texts, Path(request["tracefs"]))
    return bcc.BPF(src_file=bytes(source), cflags=flags)


def import_bcc() -> Any:
    """Debian's BCC bindings: pure Python over ctypes, which a virtual environment can use too."""
    if not kernel_headers().exists():
        raise OSError(f"it needs kernel headers in {kernel_headers()}: install them, or link another kernel's (`make headers`)")
    sys.path.append(DIST_PACKAGES)
    try:
        import bcc
    except ImportError:
        raise OSError("BCC is not installed; on Debian: apt-get install python3-bpfcc") from None
    return bcc


def kernel_headers() -> Path:
    """The folder of the running kernel's headers."""
    return Path("/lib/modules") / platform.release() / "build"


def kernel_offsets(texts: str, known: dict[str, int] | None) -> list[str]:
    """Compiler flags with the offsets of the kernel's struct members: known ones, else from headers of this very kernel."""
    fields = {*KERNEL_FIELD.findall(texts), *(("task_struct", name) for name in TASK_FIELD.findall(texts))}
    flags = [f"-DOFFSET_OF_NOTHING={NO_FIELD}"]
    if known is not None:
        return flags + [f"-DOFFSET_{owner}_{name}={known.get(f'{owner}_{name}', NO_FIELD)}" for owner, name in sorted(fields)]
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    absent = {place for place, is_there in VARYING_FIELDS.items() if not is_there(version)}
    flags += [flag for header in HEADERS for flag in ("-include", f"linux/{header}.h")]
    flags += [f"-DOFFSET_{owner}_{name}=offsetof(struct {owner},{name})" for owner, name in sorted(fields - absent)]
    return flags + [f"-DOFFSET_{owner}_{name}={NO_FIELD}" for owner, name in sorted(absent)]


def tracepoint_offsets(texts: str, tracefs: Path) -> list[str]:
    """Compiler flags with the offsets of tracepoint fields; 0 for fields that this kernel lacks."""
    offsets = {f"{event}_{field}": "0" for event, field in USED_FIELD.findall(texts)}
    for event in dict(USED_FIELD.findall(texts)):
        names = TRACEPOINTS.get(event, (event,))
        for path in (path for name in names for path in tracefs.glob(f"events/*/{name}/format")):
            for is_location, field, offset in TRACEPOINT_FIELD.findall(path.read_text()):
                offsets[f"{event}_{'__data_loc_' if is_location else ''}{field}"] = offset
    return [f"-DOFFSET_{place}={offset}" for place, offset in offsets.items()]


if __name__ == "__main__":
    main(*sys.argv[1:])
