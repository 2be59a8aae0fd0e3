"""Compiles subgraphs for the NPU ahead of their first use; their context binaries stay in the package."""

from runtime.attention import past_tier
from runtime.convert import Progress
from runtime.htp import HtpBackend
from runtime.package import Package, attention_name, expert_name


def precompile(
    package: Package, tiers: tuple[int, ...], chunk: int, context: int, soc: str = "", progress: Progress | None = None
) -> None:
    """Every expert in every tier, and every layer's attention in `chunk` rows over a past of `context` (0: none of it)."""
    family, backend = package.family, HtpBackend(package, tiers or (1,), soc=soc)
    past = past_tier(context)
    wanted: list[tuple[str, dict[str, int]]] = []
    for layer in range(family.layers):
        if chunk:
            wanted.append((attention_name(layer, portable=True), {"T": chunk, "P": past, "S": past + chunk}))
        if layer not in family.dense:
            wanted += [(expert_name(layer, expert), {"T": tier}) for expert in range(family.experts) for tier in tiers]
    for done, (name, dims) in enumerate(wanted, 1):
        backend.session(name, dims)
        if progress:
            progress(done, len(wanted))
