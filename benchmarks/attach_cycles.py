"""Attach to a running program, record briefly, detach, many times; checks that nothing is left behind.

    sudo python -m benchmarks.attach_cycles [--rounds 200] [--pid PID --engine auto] [--levels token,graph,...] [--json FILE]

Without --pid a program is started that continuously checks its own work. After each cycle nothing of the tracer may be left:
no BPF program or map that it loaded, no changed byte in the target's code.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes, single
from workloads.attach_cycles import LEVELS, Cycle, end_steady, run_cycles, start_steady


def report_cycles(report: Report, cycles: list[Cycle], target: dict[str, int]) -> bool:
    """Whether nothing was left behind and the target, if started here, did its work correctly."""
    report.add("whole cycle", "ms", extremes(1000 * np.array([cycle.seconds for cycle in cycles])))
    last = cycles[-1]
    report.add("probes", "count", single(last.probes))
    sums = {
        name: sum(getattr(cycle, name) for cycle in cycles) for name in ("records", "lost", "left_in_kernel", "changed_sites")
    }
    for name, total in sums.items():
        report.add(f"{name.replace('_', ' ')}, in all", "count", single(total, len(cycles)))
    report.add("recorder resident", "MiB", extremes(np.array([cycle.resident_bytes for cycle in cycles]) / 2**20))
    if target:
        report.note(f"target: {target['rounds']:,} rounds, {target['wrong']} wrong, exit code {target['exit_code']}")
        report.add("longest round of the target", "ms", single(target["longest_ns"] / 1e6, target["rounds"]))
    return not sums["left_in_kernel"] and not sums["changed_sites"] and not target.get("exit_code")


def main() -> int:
    parser = make_parser(__doc__, rounds=200, help_rounds="cycles")
    parser.add_argument("--pid", type=int, help="a process that runs an engine (default: a program of ours)")
    parser.add_argument("--engine", default="moescope", help="as of `moescope attach` (default: moescope)")
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
