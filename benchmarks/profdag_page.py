"""How fast the ProfDAG page is in headless Chromium: `python -m benchmarks.profdag_page [--nodes N]`.

First paint: from the start of navigation to the first frame that shows the graph. Panning: frames per second while the pointer
drags the graph for some seconds, folded and with every layer open. Median and spread of several loads.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx

from views.profdag.page import write_profdag
from workloads.tables_fixture import make

FLAGS = "--headless=new --no-sandbox --disable-gpu --no-first-run --window-size=1400,900"
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


def graph(nodes: int, layers: int) -> nx.DiGraph:
    """A model of equal layers: a chain of operators with short and long edges, and constants that all layers read."""
    found, each = nx.DiGraph(token_id=1), nodes // layers
    common = {"expert": -1, "shape": "2048x1", "backend": "cpu", "busy_ns": 100, "wait_ns": 20, "maj_flt": 0, "gbytes_per_s": 3.0}
    for i in range(nodes):
        at = i % each
        times = {"begin_ns": i * 1000, "duration_ns": 100 + at * at % 977}
        found.add_node(
            i, role="op", type=f"TYPE_{at % 9}", name=f"op_{at}-{i // each}", layer=i // each, order=i, **common, **times
        )
        found.add_edges_from((j, i) for j in {i - 1, i - 2, i - 37} if j >= 0)
    return found


def browser(folder: str) -> Any:
    """Chromium, driven."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS.split(), f"--user-data-dir={folder}/profile"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(120)
    return driver


def pan(driver: Any, seconds: float) -> tuple[float, float]:
    """(frames per second, ms of the frame that 95 % are faster than)."""
    frames = driver.execute_async_script(PAN, seconds)
    gaps = sorted(b - a for a, b in pairwise(frames))
    return 1000 * len(gaps) / (frames[-1] - frames[0]), gaps[int(0.95 * len(gaps))]


def load(driver: Any, page: Path) -> float:
    """ms until the graph is painted."""
    driver.get(page.as_uri())
    while not (painted := driver.execute_script("return document.body && document.body.dataset.painted")):
        time.sleep(0.05)
    return float(painted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=20_000, help="operators (default %(default)s)")
    parser.add_argument("--layers", type=int, default=50, help="equal layers (default %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="loads (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of panning, each (default %(default)s)")
    options = parser.parse_args()
    manifest, tables = make(tokens=2)
    views = {
        "folded, fitted": "",
        "open, fitted": "foldAll(false)",
        "open, readable": "foldAll(false); zoom(0.5 / view.scale, 0, 0)",
    }
    paints: list[float] = []
    pans: dict[str, list[tuple[float, float]]] = {name: [] for name in views}
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "profdag.html"
        size = write_profdag(graph(options.nodes, options.layers), tables, manifest, page)
        print(f"{options.nodes} nodes, {options.layers} layers: {size / 1e6:.2f} MB")
        driver = browser(folder)
        try:
            for _ in range(options.runs):
                paints.append(load(driver, page))
                for name, script in views.items():
                    driver.execute_script(script)
                    time.sleep(0.3)
                    pans[name].append(pan(driver, options.seconds))
        finally:
            driver.quit()
    print(f"first paint: {statistics.median(paints):.0f} ms ({min(paints):.0f} to {max(paints):.0f}, n {len(paints)})")
    for name, found in pans.items():
        rates, slow = [rate for rate, _ in found], statistics.median(gap for _, gap in found)
        spread = f"{statistics.median(rates):.0f} frames/s ({min(rates):.0f} to {max(rates):.0f})"
        print(f"pan, {name}: {spread}, 95 % of frames < {slow:.0f} ms")


if __name__ == "__main__":
    main()
