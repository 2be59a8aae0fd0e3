"""How fast and how small the Perfetto writer is, on synthetic tables: `python -m benchmarks.perfetto_writer [--tokens N]`."""

import argparse
import tempfile
import time
from pathlib import Path

from tests.tables_fixture import make
from views.perfetto import write_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400, help="decoded tokens (default %(default)s)")
    parser.add_argument("--layers", type=int, default=48, help="layers of the model (default %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="repetitions (default %(default)s)")
    options = parser.parse_args()
    manifest, tables = make(options.tokens, options.layers)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.runs):
            begin = time.perf_counter()
            written = write_trace(manifest, tables, Path(folder) / "trace.pftrace")
            seconds = time.perf_counter() - begin
            rate, size = written.events / seconds / 1e6, written.bytes / written.events
            print(f"{written.events} events in {seconds:.2f} s: {rate:.2f} M events/s, {size:.1f} bytes/event")


if __name__ == "__main__":
    main()
