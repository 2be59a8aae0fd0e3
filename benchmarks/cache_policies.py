"""Hit rates of cache policies on a model's own routing: python -m benchmarks.cache_policies PACKAGE --text FILE.

Runs text through the engine, then replays the routing token by token, as in decoding, with the engine's own cache
code. Half of the segments warm up popularity counts (static), the other half is evaluated. Loads take no time here: the effect of
a disk is measured by benchmarks/memory_limited.py. PACKAGE needs a trained predictor (moescope tune predictor).
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import single
from runtime.cache_rules.eviction import LFRU, LRU, Policy, Static
from runtime.cache_rules.forms import CPU, Form
from runtime.cache_rules.replay import Event, Outcome, Replay, belady, replay
from runtime.experts.predictor import Predictor, log_odds
from runtime.experts.prefetch import SPARE, Prefetcher
from runtime.experts.routing import History
from runtime.moe import MoE
from runtime.prepare.training import Routed, collect_routing

SHARES = (0.125, 0.25, 0.5)
SEGMENT = 512


class Foreseen:
    """Precomputed predictions for every token of a segment, with the interface runtime.experts.prefetch.Odds."""

    def __init__(self, predictor: Predictor, routed: Routed):
        self.token = 0
        self._rows = {view: self._all(predictor, routed, view) for view in ("token", "next", "near")}

    @staticmethod
    def _all(predictor: Predictor, routed: Routed, view: str) -> list[np.ndarray]:
        """Log odds [n, E] by layer; without columns for layers that the view does not predict."""
        fitted, rows = predictor.views[view], []
        for layer in range(len(routed.states)):
            features = routed.features(view, layer) if layer in routed.hot else None
            scores = None if features is None else fitted.scores(layer, features)
            empty = np.full((len(routed.states[0]), fitted.maps.shape[2]), -np.inf)
            rows.append(empty if scores is None else log_odds(scores, predictor.top_k, fitted.curves[layer]))
        return rows

    def tokens(self, embedded: np.ndarray, history: History) -> np.ndarray:
        return np.stack([rows[self.token] for rows in self._rows["token"]])

    def ahead(self, layer: int, hidden: np.ndarray) -> list[np.ndarray]:
        return [rows[self.token] for rows in (self._rows["near"][layer : layer + 1] + self._rows["next"][layer + 1 : layer + 2])]


def events_of(segment: Routed) -> list[Event]:
    chosen = {layer: np.nonzero(hot)[1].reshape(len(hot), -1) for layer, hot in segment.hot.items()}
    tokens = range(len(segment.states[0]))
    layers = ((layer, choice[i].tolist()) for i in tokens for layer, choice in chosen.items())
    return [Event(tuple(Form(layer, expert, CPU, 0) for expert in experts)) for layer, experts in layers]


def with_prefetch(
    segments: list[Routed], foreseen: list[Foreseen], capacity: int, policy: Policy, family: Any, spare: float
) -> Outcome:
    played, one = Replay(capacity, policy, prefetching=True), np.zeros((1, 1), np.float32)
    for segment, predictions in zip(segments, foreseen, strict=True):
        listener = Prefetcher(predictions, played.cache, family, CPU, frugal=False, spare=spare)
        trace = iter(events_of(segment))
        for predictions.token in range(len(segment.states[0])):
            listener.step_begins(one)
            for layer in range(family.layers):
                played.begin()
                listener.layer_begins(layer, one)
                if layer not in family.dense:
                    played.run(next(trace).keys)
    return played.outcome()


def measure_policies(args: argparse.Namespace) -> list[dict[str, Any]]:
    model = MoE.load(args.package, prefetch="off")
    ids = model.encode(args.text.read_text(encoding="utf-8"))
    cut = [ids[i : i + SEGMENT] for i in range(0, len(ids) - SEGMENT, SEGMENT)]
    count = min(len(cut), max(args.tokens // SEGMENT, 2))
    segments = list(collect_routing(model.engine, [cut[i * len(cut) // count] for i in range(count)]))
    family, predictor = model.package.family, Predictor.of(model.package)
    model.close()
    warm, judged = segments[::2], segments[1::2]
    popularity = Counter((form.layer, form.expert) for segment in warm for event in events_of(segment) for form in event.keys)
    trace = [event for segment in judged for event in events_of(segment)]
    foreseen = [Foreseen(predictor, segment) for segment in judged] if predictor.trained else []
    routed_layers = len(family.routed)
    rows = []
    for share in SHARES:
        capacity = max(round(share * routed_layers * family.experts), family.top_k)
        outcomes = {name: replay(trace, capacity, make()) for name, make in (("LRU", LRU), ("LFRU", LFRU))}
        held = {key for key, _ in popularity.most_common(capacity)}
        hits = sum((form.layer, form.expert) in held for event in trace for form in event.keys)
        asked = sum(len(event.keys) for event in trace)
        outcomes = {"static": Outcome(hits, asked - hits, asked - hits), **outcomes}
        outcomes["static, evicting"] = replay(trace, capacity, Static(popularity))
        for name, make in (("LRU + prefetch", LRU), ("LFRU + prefetch", LFRU)) if foreseen else ():
            outcomes[name] = with_prefetch(judged, foreseen, capacity, make(), family, args.spare)
        outcomes["Belady"] = belady(trace, capacity)
        lru = outcomes["LRU"].reads
        rows += [
            {"share": share, "experts": capacity, "policy": name, "hit_rate": o.hit_rate, "reads_vs_lru": o.reads / lru}
            for name, o in outcomes.items()
        ]
    return [row | {"tokens": len(trace) // routed_layers} for row in rows]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--spare", type=float, default=SPARE, help="least chance of a prefetch")
    args = parser.parse_args()
    report, rows = Report("cache_policies", args), measure_policies(args)
    for row in rows:
        name = f"{row['policy']}, room for {row['share']:.1%} of the experts"
        report.add(f"{name}: hits", "%", single(100 * row["hit_rate"], row["tokens"]))
        report.add(f"{name}: reads", "ratio", single(row["reads_vs_lru"], row["tokens"]), against="LRU")
    report.finish()


if __name__ == "__main__":
    main()
