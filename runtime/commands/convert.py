"""python -m runtime convert: make a package of a model."""

import argparse
from pathlib import Path

EXAMPLES = """examples:
  python -m runtime convert /models/qwen3-moe /models/qwen3-moe.package --backend cpu --bits 4
  python -m runtime convert /models/olmoe /models/olmoe.package --backend qnn --bits 16 --tiers 1,32 --chunk 64 --soc 57
  python -m runtime generate /models/qwen3-moe.package --prompt Hello"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model")
    parser.add_argument("package", type=Path, help="folder to write; an older package there is replaced")
    parser.add_argument(
        "--backend",
        choices=("any", "cpu", "qnn"),
        default="any",
        help="any: subgraphs for CPU and NPU where the bits allow (default)",
    )
    parser.add_argument("--bits", type=int, choices=(4, 8, 16, 32), default=32, help="of the weights (default: 32)")
    parser.add_argument(
        "--attention-bits", type=int, default=0, help="of attention, shared experts, dense layers (default: --bits)"
    )
    parser.add_argument("--head-bits", type=int, default=0, help="of the projection to the vocabulary (default: --bits)")
    parser.add_argument(
        "--block", type=int, default=32, metavar="N", help="weights that share a scale at 4 and 8 bits (default: 32)"
    )
    parser.add_argument("--asymmetric", action="store_true", help="give each block a zero point too")
    npu = parser.add_argument_group("compiling for the NPU now (--backend qnn); otherwise subgraphs are compiled when first used")
    npu.add_argument("--tiers", metavar="LIST", help="rows of the experts' static shapes to compile, for example 1,8,32")
    npu.add_argument("--chunk", type=int, metavar="ROWS", help="prompt rows of the attention to compile")
    npu.add_argument(
        "--context", type=int, default=1024, metavar="TOKENS", help="longest sequence of that attention (default: 1024)"
    )
    npu.add_argument("--soc", default="", metavar="MODEL", help="what the emulator poses as; a real device knows itself")


def run(args: argparse.Namespace) -> int:
    """Convert and say what came out."""
    from runtime.commands import parse_tiers, show_progress
    from runtime.convert import Target, convert
    from runtime.errors import RequestError
    from runtime.units import show_bytes

    if args.backend != "qnn" and (args.tiers or args.chunk or args.soc):
        raise RequestError("--tiers, --chunk and --soc compile for the NPU: add --backend qnn")
    target = Target(args.backend, args.bits, args.block, not args.asymmetric, args.attention_bits, args.head_bits)
    with show_progress("converting") as progress:
        package = convert(args.model, args.package, progress, target)
    if args.tiers or args.chunk:
        from runtime.precompile import precompile

        with show_progress("compiling") as progress:
            precompile(package, parse_tiers(args.tiers) if args.tiers else (), args.chunk or 0, args.context, args.soc, progress)
    size = sum(entry["bytes"] for entry in package.manifest["files"].values())
    each = show_bytes(package.expert_bytes)
    print(f"{args.package}: {len(package.manifest['files'])} files, {show_bytes(size)}; an expert is {each} in one aligned read")
    return 0
