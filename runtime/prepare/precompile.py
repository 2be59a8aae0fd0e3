"""Compiles subgraphs for the NPU before their first use; their context binaries stay in the package.

The manifest then lists what was compiled (`compiled`: tiers, chunk, contexts, soc, layout), and an engine on this package uses
these sizes by default. Binaries finished by an interrupted compilation are kept and not compiled again.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

from runtime.backends.htp import SEPARATE, SHARED, HtpBackend, binary_versions
from runtime.package.convert import Progress
from runtime.package.layout import Package, attention_name, expert_name
from runtime.placement.options import TIERS, check_soc
from runtime.step.attention import past_tier

CHUNK = 64


@dataclass(frozen=True)
class Shapes:
    """What to compile: experts in `tiers` rows; attention in `chunk` rows and in one, over a past of each of `contexts` rows.

    layout: each of an expert's tiers in a separate binary, or all in one.
    """

    tiers: tuple[int, ...] = TIERS
    chunk: int = CHUNK
    contexts: tuple[int, ...] = (1024,)
    soc: str = ""
    layout: str = SEPARATE

    def __post_init__(self) -> None:
        check_soc(self.soc)

    def sessions(self, package: Package) -> Iterator[tuple[str, dict[str, int]]]:
        """(subgraph, dimensions) of every context binary, a layer's experts after its attention."""
        family = package.family
        for layer in range(family.layers):
            for past in self.pasts(package):
                for rows in sorted({1, self.chunk}):
                    yield attention_name(layer, portable=True), {"T": rows, "P": past, "S": past + rows}
            if layer not in family.dense and self.layout == SEPARATE:
                yield from ((expert_name(layer, expert), {"T": tier}) for expert in range(family.experts) for tier in self.tiers)

    def groups(self, package: Package) -> list[str]:
        """Experts whose tiers share one binary."""
        family = package.family
        routed = family.routed if self.layout == SHARED else []
        return [expert_name(layer, expert) for layer in routed for expert in range(family.experts)]

    def pasts(self, package: Package) -> list[int]:
        """Numbers of past rows, as sequences have them, none longer than the model's context."""
        return sorted({past_tier(min(context, package.family.context)) for context in self.contexts})


def compile_binaries(package: Package, shapes: Shapes, progress: Progress) -> int:
    """Compile missing binaries and note them in the manifest; returns the number of context binaries."""
    backend = HtpBackend(package, shapes.tiers, soc=shapes.soc)
    # Binaries compiled here are not loaded from those of an earlier compilation.
    backend.layout = SEPARATE
    jobs = [partial(backend.session, name, dims) for name, dims in shapes.sessions(package)]
    jobs += [partial(backend.share, name, shapes.tiers) for name in shapes.groups(package)]
    for done, make in enumerate(jobs, 1):
        make()
        progress(done, len(jobs))
    made_for = {"contexts": shapes.pasts(package), "tiers": list(shapes.tiers), "soc": backend.soc, "versions": binary_versions()}
    package.change_manifest({"compiled": asdict(shapes) | made_for}, "free space and convert again")
    return len(jobs)
