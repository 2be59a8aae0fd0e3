"""The options for loading a model."""

from dataclasses import dataclass
from pathlib import Path

from runtime.backends.qnn_profiling import OFF, Profiling
from runtime.cache_rules.eviction import POLICIES
from runtime.cache_rules.forms import BACKENDS
from runtime.errors import RequestError

AUTO = "auto"
PLACED = ("attention", "expert")
"""Kinds of subgraphs placed by the user or the table; the others stay on the CPU."""
TIERS = (1, 8, 32)
PERFORMANCE = ("default", "burst", "balanced", "high_performance", "low_balanced", "power_saver")
"""Performance modes of the HTP's clocks that the QNN provider can request."""
KV_BITS = (8, 16, 32)
MOST_THREADS = 1024
PREFETCH = ("auto", "on", "off")


@dataclass(frozen=True)
class Options:
    """Placement, budget and sizes of one engine.

    prefill_backend, decode_backend: where attention and experts of that phase run (`attention=cpu,expert=htp` for one each);
    `auto` follows the package's cost table; without one it uses the NPU, if there is one, for prefill and the CPU for decode.
    expert_cache: bytes, None for everything. chunk: prompt rows of one attention run. tiers: static expert shapes on the NPU, in
    rows. soc: SoC that the emulator reports, empty for its default. performance: mode of the HTP's clocks. threads: of one CPU
    graph. kv_bits: of kept keys and values.
    prefetch: load experts ahead of the router; `auto`: if the cache is limited and a trial during decoding shows that it pays.
    cache_policy: eviction policy. profile: folder for all four kinds of profile. qnn_profile: a level, or levels by subgraph
    kind; qnn_profile_every, qnn_profile_most: every Nth run of each subgraph, and the maximum number of them.
    """

    prefill_backend: str = "cpu"
    decode_backend: str = "cpu"
    expert_cache: int | None = None
    chunk: int = 64
    tiers: tuple[int, ...] = TIERS
    soc: str = ""
    performance: str = "default"
    threads: int = 1
    kv_bits: int = 32
    prefetch: str = "auto"
    cache_policy: str = "lru"
    profile: Path | None = None
    qnn_profile: str = "off"
    qnn_profile_dir: Path | None = None
    qnn_profile_every: int = 1
    qnn_profile_most: int | None = None

    def __post_init__(self) -> None:
        for chosen in (self.prefill_backend, self.decode_backend):
            if chosen != AUTO:
                parse_placement(chosen)
        self.profiling()
        check_soc(self.soc)
        if self.kv_bits not in KV_BITS:
            raise RequestError(f"keys and values of {self.kv_bits} bits are unknown: choose one of {KV_BITS}")
        named = (("prefetch", self.prefetch, PREFETCH), ("HTP performance", self.performance, PERFORMANCE))
        for what, value, known in (*named, ("cache policy", self.cache_policy, tuple(POLICIES))):
            if value not in known:
                raise RequestError(f"{what} {value!r} is unknown: choose one of {', '.join(known)}")
        if self.chunk < 1 or self.threads < 1 or not self.tiers or min(self.tiers) < 1:
            raise RequestError("chunk, threads and tiers must be 1 or more")
        if self.threads > MOST_THREADS:
            raise RequestError(f"{self.threads} threads are more than {MOST_THREADS}: give about as many as there are CPUs")

    def uses(self, backend: str) -> bool:
        """Whether any phase uses this backend."""
        return any(backend in parse_placement(chosen).values() for chosen in (self.prefill_backend, self.decode_backend))

    def profiling(self) -> Profiling:
        """The settings of QNN's profiling, as an object that may be changed while the engine runs."""
        level = "detailed" if self.profile and self.qnn_profile == OFF else self.qnn_profile
        return Profiling.parse(level, self.qnn_profile_every, self.qnn_profile_most)


def check_soc(soc: str) -> None:
    """Refuse a text that is not the number of an SoC."""
    if soc and not (soc.isascii() and soc.isdecimal()):
        raise RequestError(f"--soc {soc!r} is not an SoC number: give its number in Qualcomm's SDK, such as 57")


def parse_placement(text: str) -> dict[str, str]:
    """Kind → backend, from one backend's name for all kinds or from `attention=cpu,expert=htp`."""
    if text in BACKENDS.values():
        return dict.fromkeys(PLACED, text)
    pairs = dict(word.strip().partition("=")[::2] for word in text.split(","))
    if set(pairs) != set(PLACED) or not set(pairs.values()) <= set(BACKENDS.values()):
        names = ", ".join((AUTO, *BACKENDS.values()))
        raise RequestError(f"backend {text!r} is unknown: choose {names}, or for each its own: attention=cpu,expert=htp")
    return pairs
