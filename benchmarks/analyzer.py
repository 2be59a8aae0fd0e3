"""Records per second and memory use from a recording to all tables on disk, with a synthetic llama.cpp decode.

python -m benchmarks.analyzer [--records 1e6 1e7 1e8] [--rounds 3]
python -m benchmarks.analyzer --run RUN [--rounds 3]      the same with a recording
python -m benchmarks.analyzer --summary RUN               seconds of `moescope summary RUN`: from raw records, from tables, cached

The synthetic decode: 300 operators per token with structure on two threads, a router's choice for each of 25 layers, scheduling.
Speed is by CPU time of all threads, to exclude other processes, without imports; memory is the maximum resident
size of a separate process. 1e8 records are 7 GB on disk, plus as much for tables.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes
from tracer.recording.format import RING_HEADER_BYTES, STREAMS, write_manifest
from workloads import ROOT
from workloads.recordings import MAIN, WORKER, make_manifest, records

OPS, LAYERS, OP_NS, BATCH = 300, 25, 1000, 32
NO_SEQ = 2**64 - 1
CHILD = """
import json, resource, sys, time
from analyzer.tables.store import row_counts
begun, start = time.process_time(), time.perf_counter()
rows = row_counts(sys.argv[1])
spent = time.process_time() - begun, time.perf_counter() - start
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
print(json.dumps({"cpu": spent[0], "wall": spent[1], "rss": rss, "rows": sum(rows.values())}))
"""


def slots_of_batch() -> dict[str, np.ndarray]:
    """Slots of BATCH decode steps, in ring order, by stream; times begin at 0."""
    begin = np.arange(BATCH) * (OPS + 2) * OP_NS
    op = (begin[:, None] + OP_NS + np.arange(OPS) * OP_NS).reshape(-1)
    tensor, end = np.tile(np.arange(1, OPS + 1) * 64, BATCH), begin + (OPS + 1) * OP_NS
    every, layer = np.tile(np.arange(1, OPS + 1) % (OPS // LAYERS) == 0, BATCH), np.tile(np.arange(LAYERS), BATCH)
    routed = op[every][: BATCH * LAYERS] + 200
    rng = np.random.default_rng(1)
    chosen = np.zeros((len(routed), 32), np.uint16)
    chosen[:, :4] = np.argsort(rng.random((len(routed), 60)), axis=1)[:, :4]
    parts: list[tuple[np.ndarray, str, dict[str, Any]]] = [
        (begin, "token_begin", {"engine": 2, "n_tokens": 1, "position": np.arange(BATCH), "seq": NO_SEQ}),
        (begin + 10, "graph_begin", {"engine": 2, "handle": 9, "layer": -1, "expert": -1}),
        (end - 10, "graph_end", {"engine": 2, "handle": 9}),
        (end, "token_end", {"engine": 2, "seq": NO_SEQ}),
    ]
    for shift, tid in ((0, MAIN), (7, WORKER)):
        kinds = {"engine": 2, "tid": tid, "tensor": tensor, "type": 1, "layer": -1}
        parts.append((op + shift, "op_begin", kinds))
        parts.append((op + OP_NS - 100 + shift, "op_wait", {"engine": 2, "tid": tid}))
        away = {"tid": tid, "prev_tid": tid, "next_tid": 0, "prev_state": 1, "comm_of_next": 1, "comm": b"swapper/0"}
        parts.append((op[::20] + 300 + shift, "sched_switch", away))
        back = {"tid": 0, "pid": 0, "prev_tid": 0, "next_tid": tid, "comm_of_next": 1, "comm": b"llama-cli"}
        parts.append((op[::20] + 400 + shift, "sched_waking", {"tid": 0, "pid": 0, "woken_tid": tid, "comm": b"llama-cli"}))
        parts.append((op[::20] + 500 + shift, "sched_switch", back))
    slots = np.concatenate([records(kind, len(ts), ts=ts, **fields) for ts, kind, fields in parts])
    order = np.argsort(np.concatenate([ts for ts, _, _ in parts]), kind="stable")
    fields = {"engine": 2, "layer": layer, "n_tokens": 1, "k": 4, "count": 4, "experts": chosen}
    return {"events": slots[order], "details": records("route", len(routed), ts=routed, **fields)}


def write_recording(folder: Path, wanted: int) -> int:
    """Write a recording of about `wanted` records; returns their number."""
    folder.mkdir(parents=True)
    write_manifest(folder, json.loads(json.dumps(make_manifest())))
    parts, count, long = slots_of_batch(), OPS, BATCH * (OPS + 2) * OP_NS
    names = np.arange(1, OPS + 1)
    fields = {"tensor": names * 64, "type": 1 + (names % (OPS // LAYERS) == 0) * 3, "dtype": 0}
    shape = {"ne": [[2048, 1, 1, 1]] * OPS, "n_sources": 2, "sources": [[(n - 1) * 64, n * 64 % 640] + [0] * 8 for n in names]}
    named = [
        f"{what}-{n % LAYERS}".encode() for n, what in zip(names, ("attn_norm", "ffn_moe_gate", "ffn_out") * OPS, strict=False)
    ]
    tensors = records("tensor", OPS, engine=2, ts=999_999, name=named, **fields, **shape)
    with open(folder / "events.bin", "wb") as events, open(folder / "details.bin", "wb") as details:
        details.write(tensors.tobytes())
        for number in range(max(1, wanted // sum(map(len, parts.values())))):
            for file, slots in ((events, parts["events"]), (details, parts["details"])):
                ts = slots[:, RING_HEADER_BYTES : RING_HEADER_BYTES + 8].view("<u8")
                ts += np.uint64(1_000_000 if number == 0 else long)
                file.write(slots.tobytes())
                count += len(slots)
    return count


def measure_tables(run: Path, count: int, rounds: int, report: Report) -> None:
    """Make the tables `rounds` times, each in a separate process."""
    runs = []
    for _ in range(rounds):
        shutil.rmtree(run / "tables", ignore_errors=True)
        done = subprocess.run([sys.executable, "-c", CHILD, str(run)], check=True, capture_output=True, text=True, cwd=ROOT)
        runs.append(json.loads(done.stdout))
    cpu, wall, memory = (np.array([one[name] for one in runs]) for name in ("cpu", "wall", "rss"))
    what = f"{count:,} records to {runs[0]['rows']:,} rows"
    report.add(f"{what}, by CPU time", "M records/s", extremes(count / cpu / 1e6))
    report.add(f"{what}, by the clock", "s", extremes(wall))
    report.add(f"{what}, greatest resident size", "GiB", extremes(memory / 2**30))


def summary_seconds(run: Path, rounds: int, report: Report) -> None:
    """Time the verb as started by a user, including imports; modules are already compiled, as after any first start."""
    command = [sys.executable, "-m", "moescope", "summary", str(run)]
    with tempfile.TemporaryDirectory() as compiled:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = {**kept, "PYTHONPYCACHEPREFIX": compiled}
        start: Callable[[], object] = partial(subprocess.run, command, check=True, capture_output=True, cwd=ROOT, env=environment)
        start()
        for source, removed in (("raw records", "tables"), ("tables", "tables/summary.json"), ("the kept summary", "nothing")):
            times = [timed_start(run / removed, start) for _ in range(rounds)]
            for clock, seconds in zip(("by the clock", "by CPU time"), zip(*times, strict=True), strict=True):
                report.add(f"summary from {source}, {clock}", "s", extremes(seconds))


def timed_start(removed: Path, start: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of `start`, after `removed` was deleted."""
    shutil.rmtree(removed) if removed.is_dir() else removed.unlink(missing_ok=True)
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    start()
    spent, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--records", type=float, nargs="+", default=[1e6, 1e7])
    parser.add_argument("--run", type=Path)
    parser.add_argument("--summary", metavar="RUN", type=Path)
    args = parser.parse_args()
    report = Report("analyzer", args)
    if args.summary:
        summary_seconds(args.summary, args.rounds, report)
    elif args.run:
        slots = sum((args.run / f"{name}.bin").stat().st_size // size for name, size in STREAMS.items())
        measure_tables(args.run, slots, args.rounds, report)
    else:
        for wanted in args.records:
            with tempfile.TemporaryDirectory() as folder:
                measure_tables(Path(folder) / "run", write_recording(Path(folder) / "run", int(wanted)), args.rounds, report)
    report.finish()


if __name__ == "__main__":
    main()
