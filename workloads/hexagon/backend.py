"""Builds llama.cpp's Hexagon backend, and a stand-in for its processor's library, without a Hexagon SDK.

python -m workloads.hexagon.backend fetches the backend's source (the package llama-cpp-python, 76 MB) and llama.cpp's compiled
libraries (@node-llama-cpp/linux-x64, 11 MB) once, and builds: a minute. Prints the folder.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from workloads import ROOT
from workloads.llama_libraries import MODULE, ggml_source, library_folder

HERE = Path(__file__).parent
FOLDER = ROOT / "build" / "hexagon"
BACKEND = "libggml-hexagon.so"
HEADERS = ("AEEStdErr.h", "AEEStdDef.h", "dspqueue.h", "rpcmem.h", "remote.h", "domain.h")
DEFINES = ("__fp16=_Float16", *MODULE)
DIVISION = "- d) / d + 1"


def stand_in(folder: Path, layout: int = 3) -> Path:
    """Build libcdsprpc.so in `folder`, for messages of this layout."""
    path = folder / "libcdsprpc.so"
    _run("cc", "-O2", "-Wall", "-Werror", "-fPIC", "-shared", "-pthread", f"-DLAYOUT={layout}", HERE / "cdsprpc.c", "-o", path)
    return path


def build_fake_backend(folder: Path, layout: int = 3) -> Path:
    """Build fake_backend in `folder`, linked to a stand-in of the same layout beside it."""
    path = folder / "fake_backend"
    library = stand_in(folder, layout)
    flags = ("-O2", "-Wall", "-Werror", "-D_GNU_SOURCE", f"-DLAYOUT={layout}", f"-Wl,-rpath,{folder}")
    _run("cc", *flags, HERE / "fake_backend.c", library, "-o", path)
    return path


def real_backend() -> Path:
    """libggml-hexagon.so, built on first use."""
    path = FOLDER / BACKEND
    if path.exists():
        return path
    FOLDER.mkdir(parents=True, exist_ok=True)
    source = ggml_source(FOLDER)
    _forgive_division(source / "ggml-hexagon" / "htp" / "hex-fastdiv.h")
    for header in HEADERS:
        (FOLDER / header).write_text('#include "fastrpc.h"\n')
    folders = (FOLDER, HERE, source, source.parent / "include", source / "ggml-hexagon", source / "ggml-hexagon" / "htp")
    options = ["-w", "-O1", "-fPIC", *(f"-D{name}" for name in DEFINES), *(f"-I{folder}" for folder in folders)]
    files = [*(source / "ggml-hexagon").glob("*.cpp"), HERE / "htp_iface.c"]
    base = [f"-L{library_folder()}", "-l:libggml-base.so", f"-Wl,-rpath,{library_folder()}"]
    _run("g++", *options, "-std=c++17", "-shared", *files, *base, "-o", path)
    return path


def _forgive_division(header: Path) -> None:
    """Make a division by 0 return a number, as on Arm, where the backend runs: on x86 it ends the program."""
    text = header.read_text()
    assert DIVISION in text, f"{header} has changed"
    header.write_text(text.replace(DIVISION, "- d) / (d ? d : 1) + 1"))


def _run(*command: str | Path | Sequence[str]) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    stand_in(real_backend().parent)
    print(FOLDER)
