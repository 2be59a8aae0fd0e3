"""moescope generate: text from a prompt."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from moescope.answers import print_if_json
from moescope.arguments import add_json, add_model
from moescope.plain import for_output, warn
from runtime.commands import add_count, parse_tiers, read_objects, read_text, show_progress
from runtime.errors import RequestError

if TYPE_CHECKING:
    from runtime.moe import MoE, Token

INTERRUPTED = 130
SAMPLING: tuple[tuple[str, type, float, str, str], ...] = (
    ("--temperature", float, 0.0, "T", "0: greedy (default)"),
    ("--top-k", int, 0, "K", "sample from the K most likely tokens; 0: all (default)"),
    ("--top-p", float, 1.0, "P", "sample from the smallest set of tokens with at least this total probability"),
    ("--min-p", float, 0.0, "P", "sample from tokens with at least this fraction of the most likely token's probability"),
    ("--repetition-penalty", float, 1.0, "X", "above 1: makes repeated tokens less likely"),
)
"""Options of sampling: name, type, default, metavar, help."""
EXAMPLES = """examples:
  moescope generate /tmp/demo --prompt 'The router looks at' --max-new-tokens 32
  moescope generate /tmp/demo --prompt-file prompt.txt --prefill-backend htp --expert-cache 1.5MiB --log run.json
  moescope generate /tmp/demo --prompt Hello --prefill-backend htp --qnn-profile detailed --qnn-profile-dir csv
  moescope generate /tmp/demo --score text.txt --against htp"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--prompt-file", type=Path, help="file that holds the text to continue; -: standard input")
    prompt.add_argument("--messages", type=Path, metavar="FILE", help="conversation to answer: JSON list of {role, content}")
    add_count(parser, "--max-new-tokens", default=64, help="largest number of tokens to generate")
    parser.add_argument("--ignore-end", action="store_true", help="keep generating after the end token")
    prompt.add_argument("--score", type=Path, metavar="FILE", help="text whose tokens are scored; nothing is generated")
    parser.add_argument(
        "--against", metavar="WHERE", help="with --score: a second backend for the prompt, compared layer by layer with the first"
    )
    add_template(parser)
    add_sampling(parser)
    add_placement(parser)
    report = parser.add_argument_group("report")
    add_json(report)
    report.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log probability of every token, and of the N most likely"
    )
    report.add_argument("--log", type=Path, metavar="FILE", help="write the run's log as JSON")
    report.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="folder for host stage times, QNN's events (detailed unless --qnn-profile says basic), its log, a trace of both",
    )
    report.add_argument(
        "--qnn-profile",
        default="off",
        metavar="LEVEL",
        help="profiling by QNN itself: off, basic, detailed, optrace; or by kind: attention=detailed,expert=off",
    )
    report.add_argument("--qnn-profile-every", type=int, default=1, metavar="N", help="profile every Nth run of a subgraph")
    report.add_argument("--qnn-profile-most", type=int, metavar="N", help="largest number of profiled runs of a subgraph")
    report.add_argument(
        "--qnn-profile-dir",
        type=Path,
        metavar="DIR",
        default=Path("qnn-profile"),
        help="folder for QNN's profiles, one CSV for each session (default: qnn-profile)",
    )


def add_template(parser: argparse.ArgumentParser) -> None:
    """Declare the variables of a chat template besides the messages."""
    template = parser.add_argument_group("chat template")
    template.add_argument("--thinking", choices=("on", "off"), help="whether the model thinks first (default: the template's)")
    template.add_argument(
        "--reasoning-effort", metavar="LEVEL", help="how much it thinks, as its template calls it: low, high ..."
    )
    template.add_argument("--tools", type=Path, metavar="FILE", help="tools that it may call: JSON list of their schemas")


def template_variables(model: "MoE", args: argparse.Namespace) -> dict[str, Any]:
    """The chat template's variables from the options of `add_template`."""
    thinking = None if args.thinking is None else args.thinking == "on"
    return model.template_variables(thinking, args.reasoning_effort, read_objects(args.tools) if args.tools else None)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Declare how tokens are chosen."""
    sampling = parser.add_argument_group("sampling")
    for name, kind, default, metavar, text in SAMPLING:
        sampling.add_argument(name, type=kind, default=default, metavar=metavar, help=text)
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add_count(sampling, "--seed", default=0, help="random seed", metavar=None)


def add_placement(parser: argparse.ArgumentParser) -> None:
    """Declare where subgraphs run and how much memory they may use."""
    placement = parser.add_argument_group("placement")
    where = "cpu (default), htp, auto (the faster one in the table of `tune`), or one each: attention=cpu,expert=htp"
    placement.add_argument(
        "--prefill-backend", metavar="WHERE", default="cpu", help=f"backend for the prompt's attention and experts: {where}"
    )
    placement.add_argument("--decode-backend", metavar="WHERE", default="cpu", help="backend for new tokens, likewise")
    placement.add_argument(
        "--chunk", type=int, metavar="ROWS", help="prompt rows of one attention run (default: as compiled, or 64)"
    )
    placement.add_argument(
        "--tiers", metavar="LIST", help="rows of the experts' static shapes on HTP (default: as compiled, or 1,8,32)"
    )
    placement.add_argument(
        "--performance", metavar="MODE", help="performance mode of the HTP: default, burst, balanced, power_saver ..."
    )
    placement.add_argument("--soc", metavar="MODEL", help="SoC that the HTP emulator reports (default: as compiled)")
    add_count(placement, "--threads", default=1, help="threads of one CPU graph")
    add_caches(placement)
    placement.add_argument(
        "--package", type=Path, metavar="DIR", help="folder of the converted model (default: beside the model)"
    )


def add_caches(placement: argparse._ArgumentGroup) -> None:
    """Declare how much of experts, keys and values is kept, and in which form."""
    placement.add_argument(
        "--expert-cache",
        default="all",
        metavar="SIZE",
        help="size of the expert cache: 1.5MiB, 25%% of all experts, all (default)",
    )
    placement.add_argument(
        "--cache-policy", choices=("lru", "lfru"), default="lru", help="eviction policy of the expert cache (default: lru)"
    )
    placement.add_argument(
        "--prefetch",
        choices=("auto", "on", "off"),
        default="auto",
        help="load experts ahead of the router (auto: where a trial shows that it saves time)",
    )
    placement.add_argument(
        "--kv-bits", type=int, choices=(8, 16, 32), default=32, help="bits of a number in the KV cache (default: 32)"
    )


def run(args: argparse.Namespace) -> int:
    """Generate text, printed on standard output as it is produced, and statistics on standard error."""
    if args.score:
        return score_file(args)
    if args.against:
        raise RequestError("--against compares two scores of a text: give --score")
    check_sampling(args)
    if args.log:
        check_writable(args.log)
    given = [args.thinking, args.reasoning_effort, args.tools]
    if not args.messages and any(option is not None for option in given):
        raise RequestError("--thinking, --reasoning-effort and --tools are for a chat template: give --messages")
    prompt: str | list[int] | None = str(args.prompt) if args.prompt is not None else None
    if args.prompt_file:
        prompt = read_text(args.prompt_file)
    messages = read_objects(args.messages) if args.messages else []
    model, load_ns = load_model(args)
    with model:
        if prompt is None:
            prompt = model.apply_chat_template(messages, **template_variables(model, args))
        further = {"ignore_end": args.ignore_end, "logprobs": args.logprobs if args.json else None}
        tokens, interrupted = print_tokens(model, prompt, args, lambda token: "" if args.json else token.text, **further)
        if not args.json:
            print(flush=True)
    _print_statistics(model, args, tokens, load_ns)
    return INTERRUPTED if interrupted else 0


def score_file(args: argparse.Namespace) -> int:
    """Print the log probability of a text, and where two placements differ; 1 if by more than rounding explains."""
    from runtime.prepare.scoring import first_beyond, layer_differences

    text, places, scores = read_text(args.score), [args.prefill_backend, *([args.against] if args.against else [])], []
    for args.prefill_backend in places:
        with load_model(args)[0] as model:
            scores.append(model.score(text, states=bool(args.against)))
            engine, precisions = model.describe(), model.package.manifest["precisions"]
    bits = min(part["bits"] for part in precisions.values())
    rows = layer_differences(scores[0], scores[1], bits) if args.against else []
    beyond = first_beyond(rows)
    score, total = scores[0], float(scores[0].logprobs.sum())
    answer: dict[str, Any] = {"tokens": score.ids, "logprobs": score.logprobs.tolist(), "logprob": total, "engine": engine}
    answer["routes"] = {layer: experts.tolist() for layer, experts in score.routes.items()}
    if args.against:
        answer |= {"against": args.against, "layers": [vars(row) for row in rows]} | (
            {} if beyond is None else {"first_beyond": beyond}
        )
        answer["logprobs_against"] = scores[1].logprobs.tolist()
    if not print_if_json(args, answer, "score"):
        print(f"{len(score.ids)} tokens, log probability {total:.4f} without the first on {places[0]}")
        for row in rows:
            routes = "" if row.routes is None else f", same experts for {row.routes:.1%} of tokens"
            print(f"layer {row.layer}: differs by {row.state:.3%}, rounding explains {row.allowed:.3%}{routes}")
        if args.against:
            print("no layer differs by more than rounding" if beyond is None else f"layer {beyond} is the first beyond rounding")
    return 0 if beyond is None else 1


def check_sampling(args: argparse.Namespace) -> None:
    """Raise RequestError for wrong options of sampling, before a conversion that may take hours."""
    from runtime.moe import check_request
    from runtime.step.sampling import Sampling

    check_request(args.max_new_tokens, tuple(args.stop), getattr(args, "logprobs", None))
    Sampling(args.temperature, args.top_k, args.top_p, args.seed, args.min_p, args.repetition_penalty)


def check_writable(path: Path) -> None:
    """Raise RequestError if a file cannot be created or written."""
    new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise RequestError(f"{path} cannot be written ({error.strerror}): choose another file with --log") from None
    if new:
        path.unlink()


def load_model(args: argparse.Namespace) -> "tuple[MoE, int]":
    """(the model of `add_model` with the options of `add_placement`, converted first if needed; the ns that it took)."""
    from runtime.moe import MoE

    with show_progress("converting") as progress:
        began = monotonic_ns()
        model = MoE.load(args.model, args.expert_cache, args.package, progress, **_engine_options(args))
        load_ns = monotonic_ns() - began
    if args.prefetch == "on" and model.engine.predicts_untrained:
        warn(
            "no predictor is trained: the layers' own routers choose what to prefetch; to train one: "
            f"moescope tune predictor {model.package.folder} --text FILE"
        )
    return model, load_ns


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of Options from the arguments."""
    names = ["prefill_backend", "decode_backend", "chunk", "soc", "performance", "threads", "cache_policy", "prefetch", "kv_bits"]
    names += ["profile", "qnn_profile", "qnn_profile_dir", "qnn_profile_every", "qnn_profile_most"]
    values = {name: getattr(args, name, None) for name in names} | {"tiers": parse_tiers(args.tiers) if args.tiers else None}
    return {name: value for name, value in values.items() if value is not None}


def print_tokens(
    model: "MoE", prompt: "str | list[int]", args: argparse.Namespace, shown: "Callable[[Token], str]", **further: Any
) -> "tuple[list[Token], bool]":
    """(the tokens, also if Ctrl-C cut them short; whether it did). Prints what `shown` returns for each token as it arrives.

    Sampling and length come from `args`; `further` arguments of `MoE.generate` extend or replace them.
    """
    tokens: list[Token] = []
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    asked = {name: getattr(args, name) for name in names} | further
    try:
        for token in model.generate(prompt, **asked):
            tokens.append(token)
            print(for_output(shown(token)), end="", flush=True)
    except KeyboardInterrupt:
        return tokens, True
    return tokens, False


def _print_statistics(model: "MoE", args: argparse.Namespace, tokens: "list[Token]", load_ns: int) -> None:
    from runtime.units import show_bytes

    engine, facts = model.describe(), model.log.statistics()
    if args.log:
        try:
            model.log.write(args.log, engine)
        except OSError as error:
            raise RequestError(f"{args.log} cannot be written ({error.strerror}): choose another file with --log") from None
    if args.json:
        answer: dict[str, Any] = {"text": "".join(t.text for t in tokens), "tokens": [t.id for t in tokens]}
        if args.logprobs is not None:
            answer["logprobs"] = [{"logprob": t.logprob, "top": t.top} for t in tokens]
        print_if_json(args, answer | {"load_ns": load_ns, "engine": engine, "statistics": facts})
        return
    decode = facts["decode_ns_per_token"]
    rate = f"{decode / 1e6:.2f} ms per token on {engine['backends']['decode']}" if decode else "no decode step"
    hits = f"{facts['hit_rate']:.0%}" if facts["hit_rate"] is not None else "none"
    print(
        f"moescope: load {load_ns / 1e9:.2f} s; prefill {facts['prompt_tokens']} tokens in {facts['prefill_ns'] / 1e6:.1f} ms on "
        f"{engine['backends']['prefill']}; {rate}; "
        f"expert hits {hits}, loads {sum(facts['loads'].values())}, evictions {facts['evictions']}"
        + (f"; prefetching {facts['prefetching']}" if facts["prefetching"] else ""),
        file=sys.stderr,
    )
    memory = {name: show_bytes(size) for name, size in engine["memory_bytes"].items()}
    print(
        f"moescope: memory: experts up to {memory['experts']}, other weights {memory['weights']}, "
        f"keys and values {memory['kv']}, log up to {memory['log']}",
        file=sys.stderr,
    )
