"""moescope tune predictor: learn which experts a model chooses, and keep it in the package."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.answers import print_if_json
from moescope.arguments import add_json
from moescope.plain import print_plain
from runtime.commands import add_count, read_text, require_package, show_progress

if TYPE_CHECKING:
    from runtime.moe import MoE

EXAMPLES = """examples:
  moescope tune predictor /models/qwen3-moe.package --text train.txt
  moescope tune predictor /models/qwen3-moe.package --text train.txt more.txt --test test.txt --json"""
SEGMENT = 512  # tokens per sequence: fewer if the text would otherwise yield less than AT_LEAST sequences
AT_LEAST, SHORTEST = 40, 16
TEST_TOKENS = 10_000  # the most to evaluate on


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("package", type=Path, help="package to train for; the predictor is stored in it")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 text to learn from")
    parser.add_argument(
        "--test", type=Path, nargs="+", default=[], metavar="FILE", help="text to evaluate on (default: a tenth of --text)"
    )
    add_count(parser, "--tokens", default=50_000, help="largest number of tokens to learn from")
    parser.add_argument(
        "--expert-cache", default="all", metavar="SIZE", help="size of the expert cache while learning (default: all)"
    )
    add_count(parser, "--threads", default=1, help="threads of one CPU graph")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Train, evaluate, save and report."""
    from runtime.moe import MoE
    from runtime.package.layout import Package

    require_package(args.package)
    Package(args.package, verify=False).require_writable()
    with MoE.load(args.package, args.expert_cache, prefetch="off", threads=args.threads) as model:
        report = train_and_judge(model, args)
    if not print_if_json(args, report):
        print_report(report)
    return 0


def train_and_judge(model: "MoE", args: argparse.Namespace) -> dict[str, Any]:
    """Fit on nine tenths of the training segments, calibrate on the rest, evaluate on unseen text."""
    from runtime.experts import predictor
    from runtime.prepare import training

    family = model.package.family
    learn, test = _split_text(model, args)
    unseen, learn = learn[::10], [segment for i, segment in enumerate(learn) if i % 10]
    with show_progress("learning") as progress:
        views = training.fit_views(training.collect_routing(model.engine, learn, progress), family.layers)
    training.calibrate_views(views, training.collect_routing(model.engine, unseen), family.top_k)
    for view in views.values():
        view.maps = view.maps.astype("float16").astype("float32")
    judged = training.judge(views, training.collect_routing(model.engine, test), family.layers, family.experts, family.top_k)
    size = predictor.save_views(views, model.package)
    counts = {"train_tokens": sum(map(len, learn)), "test_tokens": sum(map(len, test)), "bytes": size}
    return {"package": str(model.package.folder), **counts, "top_k": family.top_k, "experts": family.experts, "views": judged}


def print_report(report: dict[str, Any]) -> None:
    """Print the report."""
    from runtime.units import show_bytes

    print_plain(f"{report['package']}: learnt from {report['train_tokens']} tokens, {show_bytes(report['bytes'])} of linear maps")
    print(f"held-out text, {report['test_tokens']} tokens; recall of the {report['top_k']} true experts of {report['experts']}:")
    for view, facts in report["views"].items():
        recalls = "  ".join(f"{r:.3f} at {w}" for w, r in zip(facts["widths"], facts["recall"], strict=True))
        print(f"  {view:<6} {recalls}   predicted and true chance differ by {facts['calibration_error']:.3f}")


def _split_text(model: "MoE", args: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """(training segments, test segments), spread evenly over the text; without --test, every tenth is held out."""
    from runtime.errors import RequestError

    texts, tests = ([model.encode(read_text(path)) for path in files] for files in (args.text, args.test))
    length = min(SEGMENT, model.package.family.context, max(sum(map(len, texts)) // AT_LEAST, SHORTEST))
    learn = _cut_segments(texts, length)
    test = _cut_segments(tests, length) if args.test else learn[5::10]
    if not args.test:
        learn = [segment for i, segment in enumerate(learn) if i % 10 != 5]
    learn, test = _pick_evenly(learn, max(args.tokens // length, 2)), _pick_evenly(test, max(TEST_TOKENS // length, 1))
    if len(learn) < 2 or not test:
        raise RequestError(f"{len(learn)} segments of {length} tokens are too few to learn from: give more text")
    return learn, test


def _cut_segments(texts: list[list[int]], length: int) -> list[list[int]]:
    segments = [ids[i : i + length] for ids in texts for i in range(0, len(ids), length)]
    return [segment for segment in segments if len(segment) > 1]


def _pick_evenly(segments: list[list[int]], count: int) -> list[list[int]]:
    return [segments[i * len(segments) // count] for i in range(count)] if len(segments) > count else segments
