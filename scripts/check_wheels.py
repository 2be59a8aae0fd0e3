#!/usr/bin/env python3
"""check_wheels.py BUILT DIST: checks the architecture of wheels' code, and puts them into DIST under auditwheel's tag."""

import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

from tracer.kernel.btf import STRUCT, Btf
from tracer.recording.paths import BUILT_PARTS, RECORDERS, ROOT

MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
REGISTERS = {"x86_64": "rdi", "aarch64": "regs"}
"""A field of `struct pt_regs`, the argument of BPF programs, that only this architecture has."""


def check_wheel(wheel: Path) -> int:
    """Check a wheel; raises if a built part is missing or for another architecture; returns the number of parts."""
    machine = next(name for name in MACHINES if wheel.stem.endswith(name))
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as archive:
        archive.extractall(name)
        folder = Path(name)
        parts = {path.relative_to(folder) for path in folder.rglob("*") if path.suffix in (".so", ".o")}
        missing = {part.relative_to(ROOT) for part in BUILT_PARTS} - parts
        wrong = [part for part in parts if not is_code_of(machine, folder / part)]
        for name, code in MACHINES.items():  # a host needs the recorders of all its devices
            recorder = folder / RECORDERS.relative_to(ROOT) / f"moescope-recorder-{name}"
            if not recorder.exists() or ELFFile(io.BytesIO(recorder.read_bytes()))["e_machine"] != code:
                missing.add(recorder.relative_to(folder))
    if missing or wrong:
        raise SystemExit(f"{wheel.name}: missing {sorted(map(str, missing))}, of another architecture {sorted(map(str, wrong))}")
    return len(parts)


def is_code_of(machine: str, path: Path) -> bool:
    """Whether a library is for this architecture, or a BPF object reads its registers."""
    found = ELFFile(io.BytesIO(path.read_bytes()))["e_machine"]
    if found != "EM_BPF":
        return bool(found == MACHINES[machine])
    btf = Btf.of_file(path)
    fields = btf.dtype(btf.find(STRUCT, "pt_regs")).names or ()
    return [name for name, field in REGISTERS.items() if field in fields] == [machine]


def repair_wheel(wheel: Path, folder: Path) -> Path:
    """The wheel under its platform tag, which auditwheel determines from the library versions that it needs."""
    before = set(folder.iterdir())
    done = subprocess.run(["auditwheel", "repair", "-w", str(folder), str(wheel)], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return (set(folder.iterdir()) - before).pop()


def main(built: Path, folder: Path) -> None:
    """Check every wheel, then rename it."""
    for wheel in sorted(built.glob("*.whl")):
        parts = check_wheel(wheel)
        subprocess.run(["abi3audit", "--strict", str(wheel)], check=True)
        print(f"{repair_wheel(wheel, folder)}: {parts} built parts, all of its architecture")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
