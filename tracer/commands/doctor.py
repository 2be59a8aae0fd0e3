"""`tracer doctor`: every requirement, its state, and how to get what is missing."""

import argparse
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from moescope.arguments import add_json
from moescope.calling import as_called
from moescope.plain import print_plain
from tracer.errors import TracerError
from tracer.kernel.btf import VMLINUX
from tracer.kernel.libbpf import Kernel
from tracer.kernel.loaders import BccLoader, LibbpfLoader, import_bcc
from tracer.probes.calibration import measure
from tracer.probes.perf_events import SYSCALL, TRACEFS, mount_tracefs
from tracer.probes.uprobes import UPROBE
from tracer.recording.paths import BUILT_PARTS, ROOT

EXAMPLES = """examples:
  sudo python -m tracer doctor
  sudo python -m tracer doctor --json
"""


@dataclass
class Check:
    """One requirement: what for, whether it holds, what was seen, and the remedy."""

    name: str
    needed_for: str
    required: bool
    ok: bool
    seen: str
    remedy: str


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check everything; the exit code is 1 where something required is missing."""
    checks = [check() for check in CHECKS]
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        show(checks)
    return int(any(check.required and not check.ok for check in checks))


def show(checks: list[Check]) -> None:
    """Print the checks as a table, and the remedies of what is missing."""
    from moescope.terminal import console, grid, words

    table = grid("", "requirement", "for", "seen", left=4, fold=True)
    for check in checks:
        mark = ("ok", "green") if check.ok else ("missing", "red") if check.required else ("absent", "yellow")
        table.add_row(words(mark), check.name, check.needed_for, check.seen)
    console().print(table)
    for check in checks:
        if not check.ok:
            print_plain(f"{check.name}: {as_called(check.remedy)}")


def _attempt(action: Callable[[], str]) -> tuple[bool, str]:
    try:
        return True, action()
    except (TracerError, OSError) as error:
        return False, str(error)


def _root() -> Check:
    return Check("root", "everything", True, os.geteuid() == 0, f"uid {os.geteuid()}", "type `sudo python -m tracer ...`")


def _architecture() -> Check:
    name = platform.machine()
    return Check("architecture", "everything", True, name in SYSCALL, name, "x86_64 or aarch64 is needed")


def _btf() -> Check:
    seen = str(VMLINUX) if VMLINUX.exists() else "none"
    remedy = "use a kernel built with CONFIG_DEBUG_INFO_BTF=y, or install its headers and use --loader bcc"
    return Check("kernel BTF", "CO-RE (default loader)", True, VMLINUX.exists(), seen, remedy)


def _uprobes() -> Check:
    return Check(
        "uprobes", "all engine levels", True, UPROBE.exists(), str(UPROBE), "use a kernel built with CONFIG_UPROBE_EVENTS=y"
    )


def _tracefs() -> Check:
    if os.geteuid() == 0:
        mount_tracefs()
    there = (TRACEFS / "events").exists()
    return Check("tracefs", "process and sched levels", True, there, str(TRACEFS), f"mount -t tracefs tracefs {TRACEFS}")


def _built() -> Check:
    missing = [path.name for path in BUILT_PARTS if not path.exists()]
    return Check(
        "built parts",
        "everything",
        True,
        not missing,
        "missing: " + ", ".join(missing) if missing else str(ROOT),
        "run `make build`",
    )


def _libbpf() -> Check:
    def load() -> str:
        loader = LibbpfLoader(Kernel(), {"empty"}, {})
        cost = measure(loader.program_fd("empty"))
        loader.close()
        pairs = ((name, ns, cost[f"cold_{name}"]) for name, ns in cost.items() if not name.startswith("cold_"))
        return ", ".join(f"{name} {ns:.0f}..{cold:.0f} ns" for name, ns, cold in pairs) + " per hit (warm..cold caches)"

    ok, seen = _attempt(load)
    return Check(
        "libbpf loads and probes", "default loader", True, ok, seen, "as root: apt-get install libbpf1; run `make build`"
    )


def _bcc() -> Check:
    def load() -> str:
        loader = BccLoader(Kernel(), {"empty"}, {})
        loader.close()
        return f"BCC {import_bcc().__version__}"

    ok, seen = _attempt(load)
    remedy = "apt-get install python3-bpfcc linux-headers-$(dpkg --print-architecture); in a checkout then `make headers`"
    return Check("BCC compiles and loads", "--loader bcc", False, ok, seen[:100], remedy)


def _package(name: str, purpose: str, required: bool, remedy: str) -> Check:
    try:
        seen = version(name)
    except PackageNotFoundError:
        seen = "not installed"
    return Check(name, purpose, required, seen != "not installed", seen, remedy)


def _htp() -> Check:
    check = _package("onnxruntime-qnn", "NPU (HTP; emulated on x86-64)", False, "pip install 'moescope[npu]'")
    if check.ok and platform.machine() == "x86_64":
        check.seen += " (HTP emulator: functional, no timing model)"
    return check


def _program(name: str, purpose: str, remedy: str) -> Check:
    path = shutil.which(name)
    return Check(name, purpose, False, path is not None, path or "not found", remedy)


CHECKS: list[Callable[[], Check]] = [
    _architecture,
    _root,
    _btf,
    _uprobes,
    _tracefs,
    _built,
    _libbpf,
    _bcc,
    lambda: _package("onnxruntime", "the runtime", False, "pip install 'moescope[runtime]'"),
    _htp,
    lambda: _package("viztracer", "views open --offline, tests", False, "pip install 'moescope[dev]'"),
    lambda: _program("clang", "building bpf/", "apt-get install clang"),
    lambda: _program("chromium", "browser tests", "apt-get install chromium chromium-driver"),
]
