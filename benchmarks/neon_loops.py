"""Inner loops of the arm64 kernels in llvm-mca: cycles per byte of weights with everything in caches.

python -m benchmarks.neon_loops [--cpus neoverse-v2,cortex-x4,oryon-1] [--ggml DIR] [--kleidiai DIR]
                                [--compiler aarch64-linux-gnu-gcc] [--mca llvm-mca-19]

4-bit codes in blocks of 32. A loop over one row processes a group of eight blocks of two columns; a tile processes a block of
eight rows and four columns. --ggml: llama.cpp's folder `ggml`, for its Q4_0 loops, compiled the same way (also needs g++): one
column, as weights are stored in a file; four columns, repacked; tiles of sixteen rows and four columns. --kleidiai: the folder of
Arm's KleidiAI, for its kernels of the same kinds (one row or sixteen, four repacked columns, a scale per block and row), which
are assembly. Bytes are those of codes only.

The figures are from a scheduling model, not a processor: they are suited to comparing loops for one processor. Instructions
that its model lacks are named and omitted: such figures are bounds, and there are none if the products are among them. Tiles of
different heights are compared by products per cycle.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import single
from runtime.backends.instruction_sets import LIBRARY

FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-S", "-o", "-")
MARCH = {"sdot": "armv8.2-a+fp16+dotprod", "smmla": "armv8.2-a+fp16+dotprod+i8mm"}
OWN = LIBRARY.with_name("kernels")
INCLUDES = ("include", "src", "src/ggml-cpu")
LABEL = re.compile(r"\s*(\.L\d+|\d+):")
BACK = re.compile(r"\s*(?:b\S*|cbn?z\s+\w+,|tbn?z\s+\w+,.*,)\s*(?:(\.L\d+)|(\d+)b)$")
ENCODED = re.compile(r"\.inst 0x\w+\s+//")  # precedes the instruction's name in ggml's code
ITERATIONS = 200


class Loop(NamedTuple):
    """A loop, identified as the shortest with a number of an instruction; bytes of weights and products of one iteration."""

    name: str
    source: str
    instruction: str
    times: int
    weights: int
    products: int
    function: str = "way_4_16"
    unpacked: int = 0  # so many shifts that unpack, where several loops have as many of the instruction
    label: str = ""  # where the loop begins, if it is not the shortest


LOOPS = (
    Loop("one row, sdot", "neon_dotprod.c", "sdot", 32, 2 * 8 * 16, 2 * 8 * 32, unpacked=16),
    Loop("tile, sdot", "neon_dotprod.c", "sdot", 64, 4 * 16, 8 * 4 * 32, "tiles_4_16"),
    Loop("tile, smmla", "neon_i8mm.c", "usmmla", 32, 4 * 16, 8 * 4 * 32, "tiles_4_16"),
)
QUANTS, REPACK = (f"src/ggml-cpu/arch/arm/{name}" for name in ("quants.c", "repack.cpp"))
GGML_LOOPS = (
    Loop("ggml, one row, sdot", QUANTS, "sdot", 4, 2 * 16, 2 * 32, "ggml_vec_dot_q4_0_q8_0"),
    Loop("ggml, one row and four columns, sdot", REPACK, "sdot", 8, 4 * 16, 4 * 32, "ggml_gemv_q4_0_4x4_q8_0"),
    Loop("ggml, tile, sdot", REPACK, "sdot", 128, 4 * 16, 16 * 4 * 32, "ggml_gemm_q4_0_4x4_q8_0"),
    Loop("ggml, tile, smmla", REPACK, "smmla", 64, 4 * 16, 16 * 4 * 32, "ggml_gemm_q4_0_4x8_q8_0"),
)
KLEIDIAI = "kai/ukernels/matmul/matmul_clamp_f32_qsi8d32p_qsi4c32p/kai_matmul_clamp_f32_"
ROW, TILE_DOT, TILE_MMLA = (
    f"{KLEIDIAI}{name}_asm.S"
    for name in (
        "qsi8d32p1x4_qsi4c32p4x4_1x4_neon_dotprod",
        "qsi8d32p4x4_qsi4c32p4x4_16x4_neon_dotprod",
        "qsi8d32p4x8_qsi4c32p4x8_16x4_neon_i8mm",
    )
)
KLEIDIAI_LOOPS = (
    Loop("KleidiAI, one row and four columns, sdot", ROW, "sdot", 8, 4 * 16, 4 * 32, label=".L3"),
    Loop("KleidiAI, tile, sdot", TILE_DOT, "sdot", 128, 4 * 16, 16 * 4 * 32, label=".L3"),
    Loop("KleidiAI, tile, smmla", TILE_MMLA, "smmla", 64, 4 * 16, 16 * 4 * 32, label=".L3"),
)


def main() -> None:
    """Compile the loops and print the figures."""
    args = parser().parse_args()
    report = Report("neon_loops", args)
    for loop in (*LOOPS, *(GGML_LOOPS if args.ggml else ()), *(KLEIDIAI_LOOPS if args.kleidiai else ())):
        text = shortest_loop(loop, lines_of(loop, args))
        for cpu in args.cpus.split(","):
            total, left_out = total_cycles(args.mca, cpu, text)
            cycles = total / ITERATIONS
            if left_out:
                report.note(f"{loop.name}, {cpu}: left out, as the model lacks them: {', '.join(left_out)}")
            if any(instruction.startswith(loop.instruction) for instruction in left_out):
                continue
            report.add(
                f"{loop.name}, {cpu}",
                "cycles per byte of weights",
                single(cycles / loop.weights),
                labels=("at least",) * bool(left_out),
            )
            report.add(
                f"{loop.name}, {cpu}", "products per cycle", single(loop.products / cycles), labels=("at most",) * bool(left_out)
            )
    report.finish()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--cpus", default="neoverse-v2,cortex-x4,oryon-1", metavar="NAME,NAME", help="as llvm-mca knows them")
    parser.add_argument("--ggml", type=Path, metavar="DIR", help="llama.cpp's folder ggml")
    parser.add_argument("--kleidiai", type=Path, metavar="DIR", help="KleidiAI's folder")
    parser.add_argument("--compiler", default="aarch64-linux-gnu-gcc")
    parser.add_argument("--mca", default="llvm-mca-19")
    return parser


def lines_of(loop: Loop, args: argparse.Namespace) -> list[str]:
    """The assembly lines around a loop."""
    if loop in KLEIDIAI_LOOPS:
        return disassembled_source(args.compiler, args.kleidiai, loop)
    return compiled_lines(args.compiler, args.ggml if loop in GGML_LOOPS else OWN, loop)


def disassembled_source(compiler: str, folder: Path, loop: Loop) -> list[str]:
    """An assembly source as the disassembler prints it: newer instructions decoded, labels named as compilers do."""
    with tempfile.NamedTemporaryFile(suffix=".o") as made:
        command = [compiler, "-c", f"-march={MARCH['smmla']}", f"-I{folder}", "-o", made.name, str(folder / loop.source)]
        subprocess.run(command, check=True)
        objdump = [compiler.replace("gcc", "objdump"), "-d", "--no-addresses", "--no-show-raw-insn", made.name]
        text = subprocess.run(objdump, check=True, capture_output=True, text=True).stdout
    return [re.sub(r"<label_(\d+)>", r".L\1", line).partition("//")[0].rstrip() for line in text.splitlines()]


def compiled_lines(compiler: str, folder: Path, loop: Loop) -> list[str]:
    """The assembly lines of the loop's function. The kernels set their own target."""
    theirs = [f"-march={MARCH.get(loop.instruction)}", *(f"-I{folder / name}" for name in INCLUDES)]
    command = [compiler, *FLAGS, *(() if folder == OWN else theirs), str(folder / loop.source)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    function = re.search(rf"^{loop.function}:\n(.*?)\.size", text, re.DOTALL | re.MULTILINE)
    assert function, f"{loop.source} has no function {loop.function}"
    return [line for line in ENCODED.sub("", function[1]).splitlines() if not line.startswith(("#", "//"))]


def shortest_loop(loop: Loop, lines: list[str]) -> str:
    """The lines between a label and a jump back to it."""
    labels: dict[str, int] = {}
    spans: list[list[str]] = []
    for number, line in enumerate(lines):
        if label := LABEL.match(line):
            labels[label[1]] = number
        if (jump := BACK.match(line)) and (jump[1] or jump[2]) in labels:
            spans.append(lines[labels[jump[1] or jump[2]] : number + 1])
    if loop.label:
        spans = [span for span in spans if span[0].startswith(f"{loop.label}:")]
    fitting = [span for span in spans if count_instruction(span, loop.instruction) == loop.times]
    found = min((span for span in fitting if loop.unpacked in (0, count_instruction(span, "ushr"))), key=len)
    return "\n".join(found)


def count_instruction(span: list[str], instruction: str) -> int:
    """How many lines have the instruction."""
    return sum(bool(re.search(rf"\s{instruction}\s", line)) for line in span)


def total_cycles(mca: str, cpu: str, text: str) -> tuple[int, list[str]]:
    """(cycles of ITERATIONS iterations, instructions that the processor's model lacks, which are not included)."""
    command = [mca, "-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", "-mattr=+dotprod,+i8mm", f"-iterations={ITERATIONS}"]
    command.append("-skip-unsupported-instructions=lack-sched")
    done = subprocess.run(command, input=text + "\n", capture_output=True, text=True, check=True)
    cycles = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert cycles, done.stdout
    return int(cycles[1]), [" ".join(words.split()) for words in re.findall(r"note: instruction:(.*)", done.stderr)]


if __name__ == "__main__":
    main()
