"""llama.cpp as the npm package @node-llama-cpp/linux-x64 ships it: libraries that load their backends."""

import shutil
import subprocess
import sys
from pathlib import Path

from workloads import ROOT

PACKAGE = "@node-llama-cpp/linux-x64"
FOLDER = ROOT / "build" / "llama-sets"


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
