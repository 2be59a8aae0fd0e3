"""A folder whose files take long to read, as registers behind a slow bus: a file system in user space.

    python -m workloads.slow_files SOURCE MOUNTED SECONDS

MOUNTED shows the files of SOURCE as they are at each read, one read after the other, each after SECONDS, until it is unmounted.
Layouts: include/uapi/linux/fuse.h of Linux, protocol 7.31. Needs root.
"""

import ctypes
import errno
import os
import stat
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS, INTERRUPT, FORGETS = (
    *(1, 2, 3, 14, 15, 18, 25, 26, 27, 28, 29, 34, 36, 42),
)
SILENT = (FORGET, FORGETS, INTERRUPT)
DIRECT_IO = 1
LARGEST = 1 << 17
IN, OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
MNT_DETACH = 2


class SlowFiles:
    """The files of a folder by the numbers that the kernel knows them by; 1 is the folder itself."""

    def __init__(self, source: Path, seconds: float):
        self.paths, self.seconds = [source, source], seconds

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        """The reply to one request; OSError is an error of the file."""
        path = self.paths[node] if node < len(self.paths) else self.paths[0]
        if opcode == LOOKUP:
            return self.entry(path / os.fsdecode(body.rstrip(b"\0")))
        if opcode == GETATTR:
            return struct.pack("<QII", 0, 0, 0) + attributes(path, node)
        if opcode in (OPEN, OPENDIR):
            return struct.pack("<QII", 0, DIRECT_IO if opcode == OPEN else 0, 0)
        if opcode == READ:
            time.sleep(self.seconds)
        if opcode in (READ, READDIR):
            _, offset, size = struct.unpack_from("<QQI", body)
            return (path.read_bytes() if opcode == READ else entries(path))[offset : offset + size]
        if opcode == INIT:
            return struct.pack("<IIIIHHIIHHI7I", 7, 31, 0, 0, 0, 0, LARGEST // 2, 1, 0, 0, 0, *[0] * 7)
        if opcode in (RELEASE, RELEASEDIR, FLUSH, ACCESS):
            return b""
        raise OSError(errno.ENOSYS, "")

    def entry(self, path: Path) -> bytes:
        """A file's number and attributes."""
        path.lstat()
        if path not in self.paths:
            self.paths.append(path)
        node = self.paths.index(path)
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + attributes(path, node)

    def serve(self, device: int) -> None:
        """Answer requests until the folder is unmounted."""
        while True:
            try:
                request = os.read(device, LARGEST)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return
            _, opcode, unique, node, *_ = IN.unpack_from(request)
            if opcode in SILENT:
                continue
            code, reply = 0, b""
            try:
                reply = self.answer(opcode, node, request[IN.size :])
            except OSError as error:
                code = -(error.errno or errno.EIO)
            os.write(device, OUT.pack(OUT.size + len(reply), code, unique) + reply)


def attributes(path: Path, node: int) -> bytes:
    """A file's attributes; files have the length of a page, as sysfs' have."""
    mode = path.lstat().st_mode
    size = 0 if stat.S_ISDIR(mode) else 4096
    return struct.pack("<6Q10I", node, size, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def entries(path: Path) -> bytes:
    """The names in a folder, as the kernel reads them."""
    answer = b""
    for name in sorted(os.listdir(path)):
        text = os.fsencode(name)
        length = 24 + (len(text) + 7) // 8 * 8
        answer += struct.pack("<QQII", 99, len(answer) + length, len(text), 0) + text.ljust(length - 24, b"\0")
    return answer


def mount(place: Path) -> int:
    """Mount a file system that this process serves; returns the descriptor of its requests."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"slow", os.fsencode(place), b"fuse", ctypes.c_ulong(0), options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return device


@contextmanager
def slow_folder(source: Path, place: Path, seconds: float) -> Iterator[Path]:
    """`place` shows `source` with slow reads, until the end."""
    place.mkdir()
    served = Popen([sys.executable, "-m", "workloads.slow_files", str(source), str(place), str(seconds)])
    try:
        while not os.path.ismount(place) and served.poll() is None:
            time.sleep(0.01)
        yield place
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(place), MNT_DETACH)
        served.wait()


if __name__ == "__main__":
    SlowFiles(Path(sys.argv[1]), float(sys.argv[3])).serve(mount(Path(sys.argv[2])))
