"""Compiles the C programs whose truth is known."""

import subprocess
from pathlib import Path

from workloads import PROGRAMS, ROOT

SITES = ROOT / "runtime" / "telemetry"
# The extension with the sites is linked by its bare name; Python's own symbols in it stay unresolved, for nothing calls them.
WITH_SITES = (
    "-rdynamic",
    f"-L{SITES}",
    "-l:_probes.so",
    f"-Wl,-rpath,{SITES},--allow-shlib-undefined,-z,lazy",
)


def compiled(output: Path, *sources: str, flags: tuple[str, ...] = ()) -> Path:
    """The program `output`, made of sources in workloads/programs."""
    paths = [str(PROGRAMS / name) for name in sources]
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", str(output), *paths, *flags]
    subprocess.run(command, check=True)
    return output
