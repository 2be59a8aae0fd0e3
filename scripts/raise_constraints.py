#!/usr/bin/env python3
"""Writes the newest releases that fit pyproject.toml, as pip resolves them here, into a constraints file."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = "# The releases that were tested together. `make constraints` raises them; `make test` then says whether they may stay.\n"


def newest_releases() -> dict[str, str]:
    """Distribution → release, for this project with all extras; installs nothing."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    report = subprocess.run([*command, "-e", f"{ROOT}[all,dev]"], check=True, stdout=subprocess.PIPE, text=True).stdout
    packages = (item["metadata"] for item in json.loads(report)["install"])
    return {package["name"].lower(): package["version"].partition("+")[0] for package in packages}


if __name__ == "__main__":
    releases = newest_releases()
    releases.pop("moescope")
    Path(sys.argv[1]).write_text(HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(releases.items())))
