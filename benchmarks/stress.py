"""Records per second of the recorder, and whether losses are counted exactly.

    sudo python -m benchmarks.stress [--seconds 30] [--threads 1,2] [--ring-mib 32] [--json FILE]

A C program hits the cheapest kind of site (a 5-byte nop before a USDT site) in a loop, one record per hit, and counts its
hits. Every hit must be a record in the file or a loss that the kernel side counted: the sums are compared exactly. The
recorder's CPU time is that in excess of an empty run (loading, calibrating), as a share of one core; time in the BPF program
is per hit.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import single
from workloads.stress import Result, build_program, record_stress


def report_run(report: Report, result: Result, idle_cpu_s: float) -> None:
    """The figures of one run."""
    name = f"{result.threads} thread{'s' * (result.threads > 1)}, ring of {result.ring_bytes >> 20} MiB"
    share = (result.tracer_cpu_s - idle_cpu_s) / result.seconds
    unaccounted = result.hits - result.records - result.lost
    report.add(f"{name}: records", "1/s", single(result.records / result.seconds))
    report.add(f"{name}: lost", "%", single(100 * result.lost / result.hits))
    report.add(f"{name}: hits that are neither record nor loss", "count", single(unaccounted, result.hits))
    report.add(f"{name}: the recorder's CPU time", "% of a core", single(100 * share))
    report.add(f"{name}: the recorder's largest resident set", "MiB", single(result.resident_bytes / 2**20))
    report.add(f"{name}: in the BPF program, per hit", "ns", single(1e9 * result.bpf_s / result.hits))
    report.add(f"{name}: on disk, per record", "B", single(result.bytes_per_record))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--threads", default="1,2", help="numbers of threads that hit, one run each (default: 1,2)")
    parser.add_argument("--ring-mib", type=int, default=32)
    parser.add_argument("--buffer", choices=("ring", "perf"), default="ring")
    parser.add_argument("--folder", type=Path, help="where recordings go while they are made (default: the temporary folder)")
    args = parser.parse_args()
    report, exact = Report("stress", args), True
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        program = build_program(Path(folder))
        idle_cpu_s = record_stress(program, 0, 1, args.ring_mib, args.buffer).tracer_cpu_s
        for threads in map(int, args.threads.split(",")):
            result = record_stress(program, args.seconds, threads, args.ring_mib, args.buffer)
            report_run(report, result, idle_cpu_s)
            exact = exact and result.exact
    report.finish()
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
