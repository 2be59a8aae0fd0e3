"""Inner loops of the arm64 kernels, compiled and fed to llvm-mca: cycles per byte of weights where caches hold everything.

python -m benchmarks.neon_loops [--cpus neoverse-v2,cortex-x4,oryon-1] [--compiler aarch64-linux-gnu-gcc] [--mca llvm-mca-19]

4-bit codes in blocks of 32. A loop of one row takes a group of eight blocks of a column; a tile takes a block of four rows and
eight columns. The figures are a scheduling model's, not a processor's: they are good for comparing loops of one
processor. Instructions that its model lacks are named and left out: such figures are bounds.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib.report import Report, arguments
from benchmarks.lib.spread import single
from runtime.backends.instruction_sets import LIBRARY

FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-S", "-o")
FUNCTION = re.compile(r"^way_4_16:\n(.*?)\.size", re.DOTALL | re.MULTILINE)
BACK = re.compile(r"\s+(?:b\S*|cbn?z\s+\w+,|tbn?z\s+\w+,.*,)\s*(\.L\d+)$")
ITERATIONS = 200


class Loop(NamedTuple):
    """How to know a loop: the shortest with so many of an instruction. What one turn of it takes: bytes of weights, products."""

    name: str
    source: str
    instruction: str
    times: int
    weights: int
    products: int


LOOPS = (
    Loop("one row, sdot", "neon_dotprod", "sdot", 16, 8 * 16, 8 * 32),
    Loop("tile, sdot", "neon_dotprod", "sdot", 64, 8 * 16, 4 * 8 * 32),
    Loop("tile, smmla", "neon_i8mm", "smmla", 32, 8 * 16, 4 * 8 * 32),
)


def main() -> None:
    """Compile and print."""
    args = parser().parse_args()
    report = Report("neon_loops", args)
    for loop in LOOPS:
        text = shortest(loop, compiled(args.compiler, loop.source))
        for cpu in args.cpus.split(","):
            total, left_out = total_cycles(args.mca, cpu, text)
            cycles = total / ITERATIONS
            if left_out:
                report.note(f"{loop.name}, {cpu}: left out, as the model lacks them: {', '.join(left_out)}")
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
    parser = arguments(__doc__)
    parser.add_argument("--cpus", default="neoverse-v2,cortex-x4,oryon-1", metavar="NAME,NAME", help="as llvm-mca knows them")
    parser.add_argument("--compiler", default="aarch64-linux-gnu-gcc")
    parser.add_argument("--mca", default="llvm-mca-19")
    return parser


def compiled(compiler: str, source: str) -> list[str]:
    """The assembly lines of the function for 4-bit codes in blocks of 32."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernel.s"
        subprocess.run([compiler, *FLAGS, str(out), str(LIBRARY.with_name("kernels") / f"{source}.c")], check=True)
        function = FUNCTION.search(out.read_text())
    assert function, f"{source}.c has no function for 4-bit codes in blocks of 32"
    return function[1].splitlines()


def shortest(loop: Loop, lines: list[str]) -> str:
    """The lines between a label and a jump back to it."""
    labels = {line[:-1]: number for number, line in enumerate(lines) if re.match(r"\.L\d+:", line)}
    jumps = ((number, BACK.match(line)) for number, line in enumerate(lines))
    spans = [lines[labels[jump[1]] : number + 1] for number, jump in jumps if jump and labels.get(jump[1], number) < number]
    named = re.compile(rf"\s{loop.instruction}\s")
    return "\n".join(min((s for s in spans if sum(map(bool, map(named.search, s))) == loop.times), key=len))


def total_cycles(mca: str, cpu: str, text: str) -> tuple[int, list[str]]:
    """Cycles of ITERATIONS turns, and the instructions that the processor's model lacks, which are not in them."""
    command = [mca, "-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", "-mattr=+dotprod,+i8mm", f"-iterations={ITERATIONS}"]
    command.append("-skip-unsupported-instructions=lack-sched")
    done = subprocess.run(command, input=text + "\n", capture_output=True, text=True, check=True)
    cycles = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert cycles, done.stdout
    return int(cycles[1]), [" ".join(words.split()) for words in re.findall(r"note: instruction:(.*)", done.stderr)]


if __name__ == "__main__":
    main()
