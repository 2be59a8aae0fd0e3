"""`moescope doctor`: every requirement, its state, and the remedy where it is missing."""

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any

from moescope.answers import print_if_json
from moescope.arguments import add_json
from moescope.plain import print_plain
from tracer.commands.machine_options import add_btf, add_on
from tracer.engines import all_engines
from tracer.errors import TracerError
from tracer.kernel.bcc_helper import import_bcc, kernel_headers
from tracer.kernel.features import ARCHITECTURES, VMLINUX, option_state
from tracer.kernel.trial import Trial, features, try_power, try_programs
from tracer.probes.denials import (
    OTHER_PIDS,
    bpf_denials,
    few_descriptors,
    has_other_namespace,
    has_own_rights,
    lockdown_mode,
    selinux_enforces,
)
from tracer.probes.tracefs import MOUNT, has_tracepoint, tracefs_folder, why_absent
from tracer.recording.paths import BUILT_PARTS, RECORDER, ROOT
from tracer.sensors import power_sources

EXAMPLES = """examples:
  sudo moescope doctor
  sudo moescope doctor --json
  moescope doctor --on adb                # requirements on a device
  sudo moescope doctor --btf kernel.btf   # on a kernel without BTF types
"""


UPROBE = Path("/sys/bus/event_source/devices/uprobe/type")


@dataclass
class Check:
    """A requirement: its purpose, whether it is met, what was found, and the remedy."""

    name: str
    needed_for: str
    required: bool
    ok: bool
    seen: str
    remedy: str


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_btf(parser)
    add_on(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check everything; the exit code is 1 if something required is missing."""
    if args.on:
        from tracer.commands.on_device import parse_targets

        return int(any([report_checks(args, checks_of(target), target) for target in parse_targets(args.on)]))
    if args.btf:
        from tracer.kernel.btf import check_file

        check_file(args.btf)
    with ThreadPoolExecutor() as pool:  # two wait for processes, most of the time
        asked = [pool.submit(check) for check in (*CHECKS, *loading_checks(args.btf), *PACKAGE_CHECKS)]
        return report_checks(args, [check.result() for check in asked])


def report_checks(args: argparse.Namespace, checks: list[Check], machine: str = "") -> int:
    """Print the checks; returns 1 if something required is missing."""
    if not print_if_json(args, {"machine": machine, "checks": checks}):
        print_checks(checks, machine)
    return int(any(check.required and not check.ok for check in checks))


def print_checks(checks: list[Check], machine: str = "") -> None:
    """Print the checks as a table, headed by the machine's name if it is another one, and the remedies for what is missing."""
    from moescope.terminal import console, grid, words

    table = grid("", "requirement", "for", "seen", left=4, title=machine)
    for check in checks:
        mark = ("ok", "green") if check.ok else ("missing", "red") if check.required else ("absent", "yellow")
        table.add_row(words(mark), check.name, check.needed_for, check.seen)
    console().print(table)
    for check in checks:
        if not check.ok:
            print_plain(f"{check.name}: {check.remedy}")


OFFERED = (
    ("uprobes", "all engine levels", True, "use a kernel built with CONFIG_UPROBE_EVENTS=y"),
    ("btf", "BPF programs", True, "use a kernel built with CONFIG_DEBUG_INFO_BTF=y (docs/devices.md)"),
    ("ring_buffers", "cheap buffers", False, "Linux 5.8 or newer; perf buffers are used instead"),
    ("syscall_tracepoints", "libraries loaded late", False, "CONFIG_FTRACE_SYSCALLS=y; raw_syscalls:sys_enter is used instead"),
    ("uprobe_multi", "fast removal of probes", False, "Linux 6.6 or newer"),
    ("cookies", "--probes", False, "Linux 5.15 or newer makes it cheaper"),
    ("fast_nop", "probes that cost one trap", False, "a kernel that emulates a probed nop instead of single-stepping it"),
)
"""The output of `moescope-recorder --probe-features`: key, purpose, whether it is required, remedy."""


def checks_of(target: str) -> list[Check]:
    """The checks of another machine, made by its recorder."""
    from tracer.commands.on_device import inspected_device

    with inspected_device(target) as device:
        root, features = device.way.root or "the shell itself", device.features
        device.write("power.json", json.dumps(power_sources()).encode())
        power = json.loads(device.way.ask(f"{device.recorder} --try-power < {device.folder}/power.json"))
    seen = [Check("root", "everything", True, True, root, "")]
    seen += [Check(key, "everything", True, True, features[key], "") for key in ("arch", "kernel")]
    words = {True: "there", False: "none"}
    offered = [Check(key, use, needed, features[key], words[features[key]], how) for key, use, needed, how in OFFERED]
    return [*seen, *offered, power_check(power)]


def _attempt(action: Callable[[], str]) -> tuple[bool, str]:
    try:
        return True, action()
    except (TracerError, OSError) as error:
        return False, str(error)


def _check_root() -> Check:
    ok, seen = os.geteuid() == 0 or has_own_rights(), f"uid {os.geteuid()}{', recorder with capabilities' * has_own_rights()}"
    return Check("root", "everything", True, ok, seen, "type `sudo moescope ...`")


def _process_numbers() -> Check:
    name, seen = "process numbers", OTHER_PIDS if has_other_namespace("pid") else "the kernel's"
    return Check(name, "run, attach", True, not has_other_namespace("pid"), seen, OTHER_PIDS)


def _check_open_files() -> Check:
    allowed, why = resource.getrlimit(resource.RLIMIT_NOFILE)[0], few_descriptors()
    return Check("open files", "everything", True, not why, f"{allowed} allowed", why or "nothing to do")


def _check_architecture() -> Check:
    name = platform.machine()
    return Check("architecture", "everything", True, name in ARCHITECTURES, name, "x86_64 or aarch64 is needed")


def _check_denials() -> Check:
    """Check for rules that deny features the kernel has; a requirement that fails because of one is not missing."""
    against = list(bpf_denials())
    enforces = "enforcing" if selinux_enforces() else "not enforcing"
    seen = "; ".join(against) or f"lockdown {lockdown_mode() or 'none'}, SELinux {enforces}"
    return Check("BPF is allowed", "everything", False, not against, seen, "; ".join(against) or "nothing to do")


def _check_btf(btf: Path | None) -> Check:
    there = (btf or VMLINUX).exists()
    seen = str(btf or VMLINUX) if there else option_state("CONFIG_DEBUG_INFO_BTF")
    remedy = "give --btf FILE with this kernel's types (docs/kernels.md), or install its headers and use --loader bcc"
    return Check("kernel BTF", "CO-RE (default loader)", True, there, seen, remedy)


def _check_uprobes() -> Check:
    there = UPROBE.exists()
    seen = str(UPROBE) if there else option_state("CONFIG_UPROBE_EVENTS")
    remedy = "use a kernel built with CONFIG_UPROBE_EVENTS=y; without it only the levels sched and io are recorded"
    return Check("uprobes", "all engine levels", True, there, seen, remedy)


def _check_tracefs() -> Check:
    why, remedy = why_absent()
    return Check("tracefs", "process and sched levels", True, not why, why or str(tracefs_folder()), remedy or MOUNT)


UNSEEN = "not known without tracefs"


def _system_calls() -> Check:
    if why_absent()[0]:
        return Check("system call events", "libraries loaded late", True, False, UNSEEN, "see tracefs")
    there = has_tracepoint("syscalls", "sys_enter_openat")
    stand_in = has_tracepoint("raw_syscalls", "sys_enter")
    seen = "syscalls:*" if there else f"{option_state('CONFIG_FTRACE_SYSCALLS')}; raw_syscalls:sys_enter is used instead"
    if not there and not stand_in:
        seen = f"{option_state('CONFIG_FTRACE_SYSCALLS')}, and no raw_syscalls:sys_enter"
    return Check("system call events", "libraries loaded late", True, there or stand_in, seen, "CONFIG_FTRACE_SYSCALLS=y")


OPTIONAL_EVENTS = (
    ("filemap", "mm_filemap_fault", "begin of page faults on files (level io)", "Linux 6.12 or newer; otherwise inferred"),
    ("block", "block_rq_issue", "block requests (level io)", "a kernel with CONFIG_BLOCK=y and block tracepoints"),
    (
        "fastrpc",
        "fastrpc_transport_send",
        "calls to the NPU (level graph); no device has confirmed it",
        "a Qualcomm kernel with FastRPC",
    ),
    (
        "qcom_glink",
        "qcom_glink_cmd_tx_data",
        "messages to the NPU (level graph); no device has confirmed it",
        "Linux 6.12 or newer on a Snapdragon",
    ),
    ("sched", "sched_switch", "level sched", "a kernel with CONFIG_SCHED_TRACER or CONFIG_EVENT_TRACING"),
)


def _check_tracepoint(category: str, name: str, purpose: str, remedy: str) -> Check:
    there = has_tracepoint(category, name)
    seen = "there" if there else UNSEEN if why_absent()[0] else "none"
    return Check(f"{category}:{name}", purpose, False, there, seen, remedy)


_first_trial = Lock()
_tried = cache(try_programs)


def _shared_trial(btf: Path | None) -> Trial:
    """The trial, which two checks read; the second waits for the first."""
    with _first_trial:
        return _tried(btf)


def _check_bpf_programs(btf: Path | None) -> Check:
    """Load all BPF programs, and name those that this kernel refuses."""

    def load() -> str:
        trial = _shared_trial(btf)
        refused = [f"{name}: {why}" for name, why in sorted(trial.refused.items())]
        if refused:
            raise TracerError(f"{len(refused)} of {trial.programs} refused: {'; '.join(refused)}")
        return f"all {trial.programs}"

    ok, seen = _attempt(load)
    remedy = "events that need a refused program are not recorded; everything else is"
    return Check("BPF programs accepted", "their levels", False, ok, seen, remedy)


def _check_cookies() -> Check:
    ok, seen = _attempt(lambda: "there" if features()["cookies"] else "not needed: each named function gets its own program")
    return Check("probe cookies", "--probes", False, ok, seen, "Linux 5.15 or newer makes it cheaper")


def _check_built_parts() -> Check:
    missing = [path.name for path in (*BUILT_PARTS, RECORDER) if not path.exists()]
    return Check(
        "built parts",
        "everything",
        True,
        not missing,
        "missing: " + ", ".join(missing) if missing else str(ROOT),
        "run `make build`",
    )


def _check_recorder(btf: Path | None) -> Check:
    def load() -> str:
        cost = _shared_trial(btf).costs
        pairs = ((name, ns, cost[f"cold_{name}"]) for name, ns in cost.items() if not name.startswith("cold_"))
        return ", ".join(f"{name} {ns:.0f}..{cold:.0f} ns" for name, ns, cold in pairs) + " per hit (warm..cold caches)"

    ok, seen = _attempt(load)
    return Check("recorder loads and probes", "everything", True, ok, seen, "as root; run `make build`")


def _check_bcc() -> Check:
    ok, seen = _attempt(lambda: f"BCC {import_bcc().__version__}, headers {kernel_headers().resolve().name}")
    remedy = "apt-get install python3-bpfcc linux-headers-$(dpkg --print-architecture); then, in a checkout, `make headers`"
    return Check("BCC and kernel headers", "--loader bcc", False, ok, seen[:100], remedy)


def _check_package(name: str, purpose: str, required: bool, remedy: str) -> Check:
    try:
        seen = version(name)
    except PackageNotFoundError:
        seen = "not installed"
    return Check(name, purpose, required, seen != "not installed", seen, remedy)


QNN_DEVICES = """
import onnxruntime as ort, onnxruntime_qnn as qnn
ort.register_execution_provider_library("QNNExecutionProvider", qnn.get_library_path())
for each in ort.get_ep_devices():
    if each.ep_name == "QNNExecutionProvider":
        print(each.device.type.name, each.device.vendor or each.ep_vendor)
"""
QNN_PATIENCE_S = 60


def _check_htp() -> Check:
    """Check for the QNN package and the devices that it finds; Qualcomm's libraries run in a separate process."""
    check = _check_package("onnxruntime-qnn", "NPU (HTP; emulated on x86-64)", False, "pip install 'moescope[npu]'")
    if not check.ok:
        return check
    try:
        done = subprocess.run(
            [sys.executable, "-c", QNN_DEVICES], capture_output=True, text=True, timeout=QNN_PATIENCE_S, check=False
        )
        devices = done.stdout.split("\n")[:-1]
    except subprocess.TimeoutExpired:
        devices = []
    except OSError as error:
        check.ok, check.seen = False, f"{check.seen}: its devices could not be queried: {error.strerror}"
        check.remedy = f"make {sys.executable} executable for this user"
        return check
    emulated = platform.machine() == "x86_64"
    check.ok = bool(devices)
    kind = "HTP emulator (functional, no timing model) on " if emulated else ""
    check.seen += f": {kind}{', '.join(devices)}" if devices else ": the package finds no QNN device on this machine"
    check.remedy = "install the device's Qualcomm drivers (libcdsprpc.so, FastRPC) and give this user access to them"
    return check


DRIVER_FOLDERS = ("vendor/lib64", "system/lib64", "usr/lib", "usr/lib64", "usr/lib/aarch64-linux-gnu", "usr/local/lib")


def check_hexagon(root: Path = Path("/")) -> Check:
    """Check for the library by which llama.cpp's Hexagon backend reaches the NPU; it is looked up, never loaded."""
    paths = [path for folder in DRIVER_FOLDERS for path in sorted((root / folder).glob("libcdsprpc.so*"))]
    purpose = "llama.cpp's Hexagon backend (level graph); no device has confirmed it"
    seen = str(paths[0]) if paths else "not found"
    return Check("libcdsprpc.so", purpose, False, bool(paths), seen, "it comes with the device's Qualcomm drivers")


def engines_on_npus() -> Check:
    """What took the place of the NPU when an engine was tested."""
    seen = "; ".join(f"{engine.name}: {engine.tried_on}" for engine in all_engines().values() if engine.tried_on)
    remedy = "on a device, begin with docs/unseen-device.md"
    return Check("engines on an NPU", "no device has confirmed them", False, True, f"tested on: {seen}", remedy)


POWER_REMEDY = (
    "energy needs a sensor: RAPL (CONFIG_INTEL_RAPL, read by root alone), a board's INA2xx (hwmon), a battery, Android's ODPM "
    "rails, or an external meter (`run --meter`); virtual machines have none"
)


def power_check(found: dict[str, Any]) -> Check:
    """Check for power sensors: what the recorder found and how fine and how often each changed within a second."""
    seen = "; ".join(power_text(found["sources"][rail["source"]], rail) for rail in found["rails"]) or "no sensor found"
    return Check("power sensors", "energy per token; no device has confirmed it", False, bool(found["rails"]), seen, POWER_REMEDY)


def power_text(source: dict[str, Any], rail: dict[str, Any]) -> str:
    """A rail with its resolution."""
    scopes = source.get("scopes", {})
    scope = next((scope for name, scope in scopes.items() if rail["rail"].startswith(name)), source["scope"])
    step = f"in steps of {rail['step'] * source['unit']:.2g}" if rail["step"] and "times" not in source else "steps unknown"
    failed = f", {rail['failures']} failed" if rail["failures"] else ""
    covers = f"of {scope}" if scope else "of what is not known"
    return (
        f"{rail['rail']} ({source['name']}, {source['kind']} {covers}): {rail['changes']} changes in {rail['readings']} readings"
        f"{failed}, {step}, {rail['reading_ns'] / 1e3:.0f} us each"
    )


def _check_power() -> Check:
    try:
        return power_check(try_power())
    except TracerError as error:
        return Check("power sensors", "energy per token", False, False, str(error), POWER_REMEDY)


def _check_program(name: str, purpose: str, remedy: str) -> Check:
    path = shutil.which(name)
    return Check(name, purpose, False, path is not None, path or "not found", remedy)


CHECKS: list[Callable[[], Check]] = [
    _check_architecture,
    _check_root,
    _process_numbers,
    _check_open_files,
    _check_denials,
    _check_uprobes,
    _check_tracefs,
    _system_calls,
    *(partial(_check_tracepoint, *event) for event in OPTIONAL_EVENTS),
    _check_built_parts,
    _check_cookies,
    _check_power,
]
PACKAGE_CHECKS: list[Callable[[], Check]] = [
    lambda: _check_package("onnxruntime", "the runtime", False, "pip install 'moescope[runtime]'"),
    _check_htp,
    check_hexagon,
    engines_on_npus,
    lambda: _check_package("viztracer", "open --offline, tests", False, "pip install 'moescope[dev]'"),
    lambda: _check_program("clang", "building bpf/", "apt-get install clang"),
    lambda: _check_program("chromium", "browser tests", "apt-get install chromium chromium-driver"),
]


def loading_checks(btf: Path | None) -> list[Callable[[], Check]]:
    """The checks that need the kernel's types: its own, or those in a file."""
    return [partial(check, btf) for check in (_check_btf, _check_recorder, _check_bpf_programs)] + [_check_bcc]
