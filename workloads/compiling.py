"""Compiles the C programs with known behaviour."""

import subprocess
from pathlib import Path

from workloads import PROGRAMS, ROOT

SITES = ROOT / "runtime" / "telemetry"
# The extension with the sites is linked by its bare name; its Python symbols remain unresolved, since nothing calls them.
WITH_SITES = (
    "-rdynamic",
    f"-L{SITES}",
    "-l:_probes.so",
    f"-Wl,-rpath,{SITES},--allow-shlib-undefined,-z,lazy",
)


def compile_c(output: Path, *sources: str, flags: tuple[str, ...] = ()) -> Path:
    """Compile sources in workloads/programs to the program `output`."""
    paths = [str(PROGRAMS / name) for name in sources]
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", str(output), *paths, *flags]
    subprocess.run(command, check=True)
    return output
