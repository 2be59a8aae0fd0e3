"""Evicts and reloads context binaries and checks for leaks: python -m benchmarks.htp_cycles PACKAGE [--rounds 1000].

Each cycle drops one expert's session on the HTP (its emulator on x86-64) and loads another from its context binary. Afterwards
memory, threads and open files must be as they were when the process was warm; then two experts run from two threads
at once and must return the same results as alone.
"""

import sys
from pathlib import Path

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import single
from runtime.backends.cpu import return_freed_memory
from runtime.backends.htp import EMULATED, HtpBackend
from runtime.package.layout import Package, expert_name
from workloads.htp_cycles import from_two_threads, run_cycles

UNITS = {"pss": ("MiB", 1 << 20), "threads": ("count", 1), "files": ("count", 1)}


def main() -> int:
    parser = make_parser(__doc__, rounds=1000, help_rounds="evictions and reloads")
    parser.add_argument("package", type=Path)
    args = parser.parse_args()
    return_freed_memory()
    package, report = Package(args.package), Report("htp_cycles", args)
    backend = HtpBackend(package, (1,))
    labels = ("emulator",) if EMULATED else ()
    names = [expert_name(0, expert) for expert in range(min(4, package.family.experts))]
    warm, half, end = run_cycles(backend, names, args.rounds)
    for when, standing_then in (("warm", warm), ("halfway", half), ("at the end", end)):
        for name, (unit, scale) in UNITS.items():
            report.add(f"{name}, {when}", unit, single(standing_then[name] / scale), labels=labels)
    same = from_two_threads(backend, names, 50)
    report.note(f"two experts from two threads: {'the same results as alone' if same else 'DIFFERENT results'}")
    report.finish()
    leaked = end["pss"] - half["pss"] > 4 << 20 or end["threads"] > warm["threads"] or end["files"] > warm["files"]
    return 1 if leaked or not same else 0


if __name__ == "__main__":
    sys.exit(main())
