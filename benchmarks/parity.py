"""The runtime against transformers over random configs of every family: greedy tokens and logits at every step.

nice python -m benchmarks.parity [--configs 156] [--seed 0] [--tokens 64] [--json FILE]

workloads/drawn_models.py documents how configs are drawn and compared.
"""

import warnings

import torch
import transformers

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes, single
from workloads.drawn_models import FAMILIES, PROMPTS, compare_prompts, drawn_config


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--configs", type=int, default=156, help="configs, shared among the families (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the first config (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens behind each prompt (default: %(default)s)")
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES), help="only these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    report, each = Report("parity", args), -(-args.configs // len(args.families))
    right = True
    for name in args.families:
        parts = [compare_prompts(name, args.seed + i, args.tokens) for i in range(each)]
        for i, part in enumerate(parts):
            if part.equal < part.tokens or part.share > 1:
                right = False
                drawn = drawn_config(name, args.seed + i)
                report.note(f"{name}, seed {args.seed + i}: {part.tokens - part.equal} of {part.tokens} tokens differ: {drawn}")
        total, equal, ties = (int(sum(part[i] for part in parts)) for i in range(3))
        report.add(f"{name}: tokens equal", "", single(equal, total))
        report.add(f"{name}: ties among them", "", single(ties, total))
        report.add(f"{name}: largest difference of logits", "", extremes([part.difference for part in parts]))
    report.note(f"{each} configs of each family, prompts of {PROMPTS} tokens")
    report.note(f"transformers {transformers.__version__}, torch {torch.__version__}")
    report.finish()
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
