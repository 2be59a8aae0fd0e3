"""moescope convert: make a package of a model."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.package.convert import PackageFormat
    from runtime.prepare.precompile import Shapes

from moescope.plain import print_plain
from runtime.commands import add_count, parse_tiers, show_progress

EXAMPLES = """examples:
  moescope convert /models/qwen3-moe /models/qwen3-moe.package --backend cpu --bits 4
  moescope convert /models/olmoe /models/olmoe.package --backend qnn --bits 16 --tiers 1,32 --chunk 64 --soc 57
  moescope convert /models/qwen3-moe /models/qwen3-moe.mine --bits 4 --adapter /adapters/mine
  moescope generate /models/qwen3-moe.package --prompt Hello"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model")
    parser.add_argument("package", type=Path, help="folder to write; an older package there is replaced")
    parser.add_argument(
        "--backend",
        choices=("any", "cpu", "qnn"),
        default="any",
        help="backend to convert for; any: CPU, and NPU if the bits allow it (default: any)",
    )
    parser.add_argument("--bits", type=int, choices=(4, 8, 16, 32), default=32, help="bits of a weight (default: 32)")
    parser.add_argument(
        "--attention-bits",
        type=int,
        default=0,
        help="bits of a weight in attention, shared experts and dense layers (default: --bits)",
    )
    parser.add_argument(
        "--head-bits", type=int, default=0, help="bits of a weight in the projection to the vocabulary (default: --bits)"
    )
    add_count(parser, "--block", default=32, help="weights that share a scale at 4 and 8 bits")
    parser.add_argument("--asymmetric", action="store_true", help="give each block a zero point too")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="LoRA adapter to merge, as peft saves it")
    npu = parser.add_argument_group(
        "compiling for the NPU at conversion",
        "any of these options compiles all subgraphs now, for these sizes; without them, the first use compiles",
    )
    npu.add_argument("--tiers", metavar="LIST", help="rows of the experts' static shapes (default: 1,8,32)")
    npu.add_argument("--chunk", type=int, metavar="ROWS", help="prompt rows of one attention run (default: 64)")
    npu.add_argument("--context", metavar="LIST", help="longest sequences that attention is compiled for (default: 1024)")
    npu.add_argument(
        "--layout",
        choices=("separate", "shared"),
        help="one binary per tier of an expert (default), or a single one whose graphs share weights",
    )
    npu.add_argument(
        "--soc", metavar="MODEL", help="SoC that the HTP emulator reports (default: 57); a real device reports its own"
    )


def run(args: argparse.Namespace) -> int:
    """Convert, compile if requested, and print the result. An up-to-date package is kept."""
    from runtime.package.convert import PackageFormat, convert, up_to_date
    from runtime.units import show_bytes

    target = PackageFormat(args.backend, args.bits, args.block, not args.asymmetric, args.attention_bits, args.head_bits)
    shapes = _compile_shapes(args, target)
    package = up_to_date(args.model, args.package, target, args.adapter)
    if package is None:
        with show_progress("converting") as progress:
            package = convert(args.model, args.package, progress, target, args.adapter)
    size = sum(entry["bytes"] for entry in package.manifest["files"].values())
    each = show_bytes(package.expert_bytes)
    print_plain(
        f"{args.package}: {len(package.manifest['files'])} files, {show_bytes(size)}; an expert is {each} in one aligned read"
    )
    if rounding := package.manifest.get("rounding"):
        shares = ", ".join(f"{use} {share:.2%}" for use, share in rounding.items())
        print_plain(f"{args.package}: weights differ from the model's by {shares} (root mean square, relative to theirs)")
    if shapes:
        from runtime.prepare.precompile import compile_binaries

        with show_progress("compiling") as progress:
            count = compile_binaries(package, shapes, progress)
        print_plain(f"{args.package}: {count} context binaries, {show_bytes(_compiled_bytes(args.package))}")
    return 0


def _compile_shapes(args: argparse.Namespace, target: "PackageFormat") -> "Shapes | None":
    """The shapes to compile now; raises before the conversion if they cannot be compiled."""
    sizes = {"chunk": args.chunk, "soc": args.soc, "layout": args.layout, "tiers": args.tiers, "contexts": args.context}
    if all(value is None for value in sizes.values()):
        return None
    from runtime.backends.htp import why_unavailable
    from runtime.errors import BackendError, RequestError
    from runtime.prepare.precompile import Shapes

    if not target.portable:
        raise RequestError(f"--tiers, --chunk, --context and --soc need the NPU, which --backend {target.backend} excludes")
    if reason := why_unavailable():
        raise BackendError(reason)
    lists = {name: parse_tiers(sizes[name]) for name in ("tiers", "contexts") if sizes[name] is not None}
    shapes = Shapes(**({name: value for name, value in sizes.items() if value is not None} | lists))
    if min(*shapes.tiers, *shapes.contexts, shapes.chunk) < 1:
        raise RequestError("tiers, chunk and context must be 1 or more")
    return shapes


def _compiled_bytes(package: Path) -> int:
    return sum(path.stat().st_size for path in package.glob("htp/*/*"))
