"""What a user chooses when loading a model."""

from dataclasses import dataclass
from pathlib import Path

from runtime.errors import RequestError
from runtime.qnn_profiling import Profiling

BACKENDS = ("auto", "cpu", "htp")
TIERS = (1, 8, 32)


@dataclass(frozen=True)
class Options:
    """Placement, budget and sizes of one engine.

    prefill_backend, decode_backend: where attention and experts of that phase run; `auto` takes the NPU where there is one for
    prefill and the CPU for decode. expert_cache: bytes, None for everything. chunk: prompt rows of one attention run.
    tiers: static expert shapes on the NPU, in rows. threads: of one CPU graph. qnn_profile: a level, or levels by subgraph kind;
    qnn_profile_every, qnn_profile_most: of each subgraph's runs every Nth, and no more than so many.
    """

    prefill_backend: str = "cpu"
    decode_backend: str = "cpu"
    expert_cache: int | None = None
    chunk: int = 64
    tiers: tuple[int, ...] = TIERS
    threads: int = 1
    qnn_profile: str = "off"
    qnn_profile_dir: Path | None = None
    qnn_profile_every: int = 1
    qnn_profile_most: int | None = None

    def __post_init__(self) -> None:
        for backend in (self.prefill_backend, self.decode_backend):
            if backend not in BACKENDS:
                raise RequestError(f"backend {backend!r} is unknown: choose one of {', '.join(BACKENDS)}")
        self.profiling()
        if self.chunk < 1 or self.threads < 1 or not self.tiers or min(self.tiers) < 1:
            raise RequestError("chunk, threads and tiers must be 1 or more")

    def profiling(self) -> Profiling:
        """What QNN shall profile, as an object that may be changed while the engine runs."""
        return Profiling.parse(self.qnn_profile, self.qnn_profile_every, self.qnn_profile_most)
