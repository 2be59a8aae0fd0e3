"""Records per second from a recording to all tables: a synthetic llama.cpp decode on two threads with scheduling.

python benchmarks/analyzer.py [--records 1000000] [--repeats 3]
python benchmarks/analyzer.py --summary RUN       seconds of `analyzer summary RUN`, kept and made anew, imports included

Speed is told by CPU time (one core, whatever else runs) and by the clock; memory is the process's greatest resident size.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer.reading import open_recording
from analyzer.tables import build
from tests.recordings import MAIN, WORKER, Writer, records

ROOT = Path(__file__).resolve().parent.parent
OPS, OP_NS = 300, 1000


def synthetic(folder: Path, n_records: int) -> int:
    """Write a recording of about `n_records` records in ring order; answers how many."""
    per_token = 2 * (OPS * 2 + OPS // 10) + 4
    tokens = max(1, n_records // per_token)
    begin = 1_000_000 + np.arange(tokens) * (OPS + 2) * OP_NS
    op = (begin[:, None] + OP_NS + np.arange(OPS) * OP_NS).reshape(-1)
    tensor = np.tile(np.arange(1, OPS + 1) * 64, tokens)
    end = begin + (OPS + 1) * OP_NS
    parts = [
        (begin, "token_begin", {"engine": 2, "n_tokens": 1, "position": 7, "seq": 2**64 - 1}),
        (begin + 10, "graph_begin", {"engine": 2, "handle": 9, "layer": -1, "expert": -1}),
        (end - 10, "graph_end", {"engine": 2, "handle": 9}),
        (end, "token_end", {"engine": 2, "seq": 2**64 - 1}),
    ]
    for shift, tid in ((0, MAIN), (7, WORKER)):
        parts.append((op + shift, "op_begin", {"engine": 2, "tid": tid, "tensor": tensor, "type": 1, "layer": -1}))
        parts.append((op + OP_NS - 100 + shift, "op_wait", {"engine": 2, "tid": tid}))
        parts.append((op[::20] + 300 + shift, "sched_switch", {"tid": tid, "prev_tid": tid, "next_tid": 0, "prev_state": 1}))
        parts.append((op[::20] + 500 + shift, "sched_switch", {"tid": 0, "pid": 0, "prev_tid": 0, "next_tid": tid}))
    slots = np.concatenate([records(kind, len(ts), ts=ts, **fields) for ts, kind, fields in parts])
    order = np.argsort(np.concatenate([ts for ts, _, _ in parts]), kind="stable")
    writer = Writer()
    names = np.arange(1, OPS + 1)
    writer.add(
        "tensor", OPS, engine=2, ts=1_000_000, tensor=names * 64, type=1, name=[f"ffn_out-{i % 16}".encode() for i in names]
    )
    writer.slots["events"].append(slots[order])
    writer.write(folder)
    return len(slots) + OPS


def summary_seconds(run: str, repeats: int) -> None:
    """Time the verb as a user starts it; its tables are there."""
    for kept in (False, True):
        spent = []
        for _ in range(repeats):
            if not kept:
                (Path(run) / "tables" / "summary.json").unlink(missing_ok=True)
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "analyzer", "summary", run], check=True, capture_output=True, cwd=ROOT)
            spent.append(time.perf_counter() - start)
        how = "kept" if kept else "made anew"
        print(f"summary {how}: median {np.median(spent):.2f} s ({min(spent):.2f} to {max(spent):.2f}, {repeats} runs)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--summary", metavar="RUN")
    args = parser.parse_args()
    if args.summary:
        summary_seconds(args.summary, args.repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        count = synthetic(Path(folder) / "run", args.records)
        speeds = []
        for _ in range(args.repeats):
            start, busy = time.perf_counter(), time.process_time()
            tables = build(open_recording(Path(folder) / "run"))
            seconds, busy = time.perf_counter() - start, time.process_time() - busy
            rows = sum(map(len, tables.values()))
            speeds.append(count / busy / 1e6)
            print(f"{count} records -> {rows} rows in {seconds:.2f} s, {busy:.2f} s of CPU: {speeds[-1]:.2f} M records/s of CPU")
        print(f"median {np.median(speeds):.2f}, best {max(speeds):.2f} M records/s of CPU, {len(speeds)} runs")
        print(f"greatest resident size {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
