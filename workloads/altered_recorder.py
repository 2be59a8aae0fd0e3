"""Builds a recorder that is altered: other BPF programs, or C sources that find another kernel."""

import platform
import subprocess
import sys
from pathlib import Path

from tracer.recording.paths import BPF_SOURCE
from workloads import ROOT
from workloads.bpf_objects import compile_object

MACHINE = platform.machine()
DEBIAN, BPF_ARCH = {"x86_64": ("amd64", "x86"), "aarch64": ("arm64", "arm64")}[MACHINE]
LIBRARIES = ROOT / "build" / "static" / DEBIAN / "usr"
SOURCES = ROOT / "tracer" / "recorder"


def build_recorder(
    folder: Path, bpf_source: Path = BPF_SOURCE, changes: tuple[tuple[str, str, str], ...] = (), flags: tuple[str, ...] = ()
) -> Path:
    """Compile a recorder for this machine, into a folder, from `bpf_source` and with changed sources.

    changes: (file of tracer/recorder, text, what takes its place), all of which must be there. flags: more words for the linker.
    """
    bpf = compile_object(bpf_source, folder / "moescope.bpf.o", BPF_ARCH)
    pack = [sys.executable, str(SOURCES / "pack.py"), str(folder / "sources.h"), str(BPF_SOURCE.parent), str(bpf)]
    subprocess.run(pack, check=True)
    sources = {path.name: path for path in sorted(SOURCES.glob("*.[cS]"))}
    for name, old, new in changes:
        text = sources[name].read_text()
        if old not in text:
            raise ValueError(f"{name} no longer has {old!r}")
        sources[name] = folder / name
        sources[name].write_text(text.replace(old, new))
    program, packed = folder / f"moescope-recorder-{MACHINE}", bpf.with_suffix(".z")
    command = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-static", '-DVERSION="altered"', "-include", str(folder / "sources.h")]
    command += [f'-D{kind}_OBJECT="{packed}"' for kind in ("RING", "PERF")]
    command += ["-iquote", str(SOURCES), f"-I{ROOT / 'bpf'}", "-isystem", str(LIBRARIES / "include"), *map(str, sources.values())]
    command += [str(ROOT / "tracer" / "probes" / "calibrate.c"), f"-L{LIBRARIES / 'lib' / f'{MACHINE}-linux-gnu'}"]
    subprocess.run([*command, *flags, "-lbpf", "-lelf", "-lz", "-ljansson", "-lpthread", "-o", str(program)], check=True)
    return program
