"""llama.cpp from the npm packages @node-llama-cpp/linux-*: libraries that load their backends, and additional backends."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from workloads import ROOT

SOURCE = "llama-cpp-python==0.3.36"
FOLDER, WITH_BLAS = ROOT / "build" / "llama-sets", ROOT / "build" / "llama-blas"
MODULE = ("_GNU_SOURCE", "GGML_BACKEND_DL", "GGML_BACKEND_BUILD", "GGML_BACKEND_SHARED", "GGML_SHARED")
"""Preprocessor macros of a backend that the package's libraries are to load."""


def library_folder(machine: str = "x64") -> Path:
    """The folder with the libraries for x64, x64-vulkan or arm64, fetched on first use."""
    folder, package = FOLDER / "package" / "bins" / f"linux-{machine}", f"@node-llama-cpp/linux-{machine}"
    if not folder.exists():
        if not shutil.which("npm"):
            sys.exit(f"npm is not installed: install it, or unpack {package} into {FOLDER}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", package]
        packed = subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, text=True).stdout.split()[-1]
        shutil.unpack_archive(FOLDER / packed, FOLDER)
    return folder


def ggml_source(folder: Path, package: str = SOURCE) -> Path:
    """The folder ggml/src of a llama.cpp, by default of about the libraries' age, in `folder`; fetched (76 MB) on first use."""
    if not any(folder.glob("*.tar.gz")):
        print(f"fetching the source of {package}", file=sys.stderr)
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            str(folder),
            package,
        ]
        subprocess.run(download, check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        wanted = [member for member in archive if "/ggml/src/" in member.name or "/ggml/include/" in member.name]
        archive.extractall(folder, wanted, filter="data")
    return next(folder.glob("*/vendor/llama.cpp/ggml/src"))


def with_blas() -> Path:
    """A libllama.so that loads a BLAS backend beside it, built on first use; Debian: libopenblas-dev."""
    WITH_BLAS.mkdir(parents=True, exist_ok=True)
    for path in library_folder().glob("*.so"):
        if not (WITH_BLAS / path.name).exists():
            os.link(path, WITH_BLAS / path.name)
    backend = WITH_BLAS / "libggml-blas.so"
    if not backend.exists():
        source = ggml_source(WITH_BLAS)
        includes = [f"-I{folder}" for folder in (source, source.parent / "include")]
        flags = ["-O2", "-fPIC", "-shared", "-std=c++17", *(f"-D{name}" for name in (*MODULE, "GGML_BLAS_USE_OPENBLAS"))]
        made = [str(source / "ggml-blas" / "ggml-blas.cpp"), f"-L{WITH_BLAS}", "-l:libggml-base.so", "-lopenblas"]
        subprocess.run(["g++", *flags, *includes, *made, "-Wl,-rpath,$ORIGIN", "-o", str(backend)], check=True)
    return next(WITH_BLAS.glob("libllama.v*.so"))
