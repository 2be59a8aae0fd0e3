"""Attach to a running program, record briefly, detach, many times; checks that nothing is left behind.

    sudo python -m benchmarks.attach_cycles [--rounds 200] [--pid PID --engine auto] [--levels token,graph,...] [--json FILE]

Without --pid a program is started that continuously checks its own work. After each cycle nothing of the tracer may be left:
no descriptor, no BPF program or map that it loaded, no changed byte in the target's code. The cost of a probe
is measured once, not in every cycle. Most of the time is grace periods of the kernel, one for each probe.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.lib.report import Report, arguments
from benchmarks.lib.spread import extremes, single
from workloads.attach_cycles import LEVELS, Cycle, end_steady, run_cycles, start_steady


def report_cycles(report: Report, cycles: list[Cycle], target: dict[str, int]) -> bool:
    """Whether nothing was left behind and the target, if started here, did its work correctly."""
    for name in ("load_s", "attach_s", "detach_s"):
        report.add(name.removesuffix("_s"), "ms", extremes(1000 * np.array([getattr(cycle, name) for cycle in cycles])))
    first, last = cycles[min(1, len(cycles) - 1)], cycles[-1]
    report.add("probes", "count", single(last.probes))
    sums = {
        name: sum(getattr(cycle, name) for cycle in cycles) for name in ("records", "lost", "left_in_kernel", "changed_sites")
    }
    for name, total in sums.items():
        report.add(f"{name.replace('_', ' ')}, in all", "count", single(total, len(cycles)))
    report.add("more descriptors at the end", "count", single(last.descriptors - first.descriptors, len(cycles)))
    report.add("more resident at the end", "MiB", single((last.resident_bytes - first.resident_bytes) / 2**20, len(cycles)))
    if target:
        report.note(f"target: {target['rounds']:,} rounds, {target['wrong']} wrong, exit code {target['exit_code']}")
        report.add("longest round of the target", "ms", single(target["longest_ns"] / 1e6, target["rounds"]))
    left = sums["left_in_kernel"] or sums["changed_sites"] or last.descriptors > first.descriptors
    return not left and not target.get("exit_code")


def main() -> int:
    parser = arguments(__doc__, rounds=200, help_rounds="cycles")
    parser.add_argument("--pid", type=int, help="a process that runs an engine (default: a program of ours)")
    parser.add_argument("--engine", default="moescope", help="as of `tracer attach` (default: moescope)")
    parser.add_argument("--levels", default=LEVELS, help=f"default: {LEVELS}")
    args = parser.parse_args()
    report = Report("attach_cycles", args)
    with tempfile.TemporaryDirectory() as folder:
        program = None if args.pid else start_steady(Path(folder))
        time.sleep(0.2)
        pid = program.pid if program else args.pid
        cycles = run_cycles(pid, args.rounds, args.engine, args.levels, lambda n: print(f"\r{n}", end="", file=sys.stderr))
        print(file=sys.stderr)
        clean = report_cycles(report, cycles, end_steady(program) if program else {})
    report.finish()
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
