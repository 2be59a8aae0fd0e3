"""llama.cpp built for one instruction set at a time, as the npm package @node-llama-cpp/linux-x64 ships it."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

from workloads import ROOT
from workloads.programs.llama_steps import declared

PACKAGE = "@node-llama-cpp/linux-x64"
FOLDER = ROOT / "build" / "llama-sets"
PEERS = {"plain": "x64", "avx2": "haswell", "avxvnni": "alderlake", "avx512vnni": "icelake"}
"""Our instruction set → the name of llama.cpp's library for the same one."""


def libraries() -> Path:
    """The folder with the libraries, fetched the first time."""
    folder = FOLDER / "package" / "bins" / "linux-x64"
    if not folder.exists():
        if not shutil.which("npm"):
            sys.exit(f"npm is not installed: install it, or unpack {PACKAGE} into {FOLDER}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", PACKAGE]
        packed = subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, text=True).stdout.split()[-1]
        shutil.unpack_archive(FOLDER / packed, FOLDER)
    return folder


def library(instruction_set: str) -> ctypes.CDLL:
    """llama.h's functions, with the CPU backend of this instruction set (one of ours) alone."""
    folder = libraries()
    ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    ggml = ctypes.CDLL(str(next(folder.glob("libggml.v*.so"))), ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load.restype, ggml.ggml_backend_load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    path = folder / f"libggml-cpu-{PEERS[instruction_set]}.so"
    if not ggml.ggml_backend_load(str(path).encode()):
        sys.exit(f"{path} does not run on this processor: leave {instruction_set} out")
    return declared(ctypes.CDLL(str(next(folder.glob("libllama.v*.so")))))
