"""Speed of the ProfDAG page in headless Chromium: `python -m benchmarks.profdag_page [--nodes N] [--rounds 5]`.

First paint: from the start of navigation to the first frame that shows the graph. Panning: frames per second while the pointer
drags the graph for some seconds, with layers folded and with every layer open. Median and spread of several loads.
"""

import contextlib
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx

from benchmarks.lib.chromium import Chromium
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes, single
from views.profdag.page import write_profdag
from workloads.tables_fixture import make_tables

VIEWS = {
    "folded, fitted": "",
    "open, fitted": "foldAll(false)",
    "open, readable": "foldAll(false); zoom(0.5 / view.scale, 0, 0)",
}
"""Name of a view → JavaScript that brings it about."""
PAN = """
const [seconds, done] = arguments, begin = performance.now(), frames = [];
const event = (name, x, y) =>
  board.dispatchEvent(new PointerEvent(name, { pointerId: 1, clientX: x, clientY: y, bubbles: true }));
board.setPointerCapture = () => {};
event('pointerdown', 700, 450);
function step(now) {
  frames.push(now);
  const t = (now - begin) / 1000;
  event('pointermove', 700 + 500 * Math.sin(2 * t), 450 + 200 * Math.sin(3 * t));
  t < seconds ? requestAnimationFrame(step) : (event('pointerup', 700, 450), done(frames));
}
requestAnimationFrame(step);
"""


def layered_graph(nodes: int, layers: int) -> nx.DiGraph:
    """The graph of a model with equal layers: a chain of operators with short and long edges, constants read by all layers."""
    dag, each = nx.DiGraph(token_id=1), nodes // layers
    common = {"expert": -1, "shape": "2048x1", "backend": "cpu", "busy_ns": 100, "wait_ns": 20, "maj_flt": 0, "gbytes_per_s": 3.0}
    for i in range(nodes):
        place = i % each
        times = {"begin_ns": i * 1000, "duration_ns": 100 + place * place % 977}
        dag.add_node(
            i, role="op", type=f"TYPE_{place % 9}", name=f"op_{place}-{i // each}", layer=i // each, order=i, **common, **times
        )
        dag.add_edges_from((j, i) for j in {i - 1, i - 2, i - 37} if j >= 0)
    return dag


def measure_pan(driver: Any, seconds: float) -> tuple[float, float]:
    """(frames per second, 95 % quantile of ms per frame)."""
    frames = driver.execute_async_script(PAN, seconds)
    gaps = sorted(b - a for a, b in pairwise(frames))
    return 1000 * len(gaps) / (frames[-1] - frames[0]), gaps[int(0.95 * len(gaps))]


def measure_load(driver: Any, page: Path) -> float:
    """ms until the graph is painted."""
    driver.get(page.as_uri())
    while not (painted := driver.execute_script("return document.body && document.body.dataset.painted")):
        time.sleep(0.05)
    return float(painted)


def main() -> None:
    parser = make_parser(__doc__, rounds=5, help_rounds="loads")
    parser.add_argument("--nodes", type=int, default=20_000, help="operators (default %(default)s)")
    parser.add_argument("--layers", type=int, default=50, help="equal layers (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of panning, each (default %(default)s)")
    args = parser.parse_args()
    manifest, tables = make_tables(tokens=2)
    report, paints, pans = Report("profdag_page", args), list[float](), {name: list[tuple[float, float]]() for name in VIEWS}
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "profdag.html"
        size = write_profdag(layered_graph(args.nodes, args.layers), tables, manifest, page)
        report.add(f"page of {args.nodes:,} nodes", "MB", single(size / 1e6))
        with contextlib.closing(Chromium(folder)) as chromium:
            for _ in range(args.rounds):
                paints.append(measure_load(chromium.driver, page))
                for name, script in VIEWS.items():
                    chromium.driver.execute_script(script)
                    time.sleep(0.3)
                    pans[name].append(measure_pan(chromium.driver, args.seconds))
    report.add("first paint", "ms", extremes(paints))
    for name, seen in pans.items():
        rates, slow = zip(*seen, strict=True)
        report.add(f"panning, {name}", "frames/s", extremes(rates))
        report.add(f"panning, {name}: 95 % of frames are faster than", "ms", extremes(slow))
    report.finish()


if __name__ == "__main__":
    main()
