"""The roofline of a step: the time of every part of every layer is the longer of computing and moving its bytes.

Formulas: products 2·m·k·n; a gated feed-forward 6·rows·hidden·width per expert; distinct experts of B routed tokens
N·(1 - ((N-k)/N)^B); attention 4·heads·dim per query and cached token (MLA: in decode on the compressed cache, in prefill
expanded), half of it in causal prefill. Indexed attention (DeepSeek-V3.2) scores every cached token with 2·heads·dim, then
attends to the chosen ones on the compressed cache. The gated delta rule takes 6·k·v per value head and token, and in prefill, by
chunks of C tokens, C·(6·k + 4·v) more (Yang et al. 2024, "Gated Delta Networks", the chunkwise form). A Mamba-2 head of
dimension d takes 5·d·n per token for its state of width n, and in prefill, by chunks of C tokens, 4·d·n + 2·C·d, and 2·C·n for
each group of heads (Dao and Gu 2024, "Transformers are SSMs", section 6). Efficiencies come from measured tables if the device
has some (`mfu`), else from the device profile; each part names its source.
"""

from collections import Counter
from dataclasses import dataclass, replace

from analyzer.errors import PredictError
from analyzer.model import Attention, DeltaNet, Indexer, Mamba2, Mixture, Model
from analyzer.predict import mfu
from analyzer.predict.curves import CurveValue
from analyzer.predict.devices import Device, Unit
from analyzer.predict.setup import KV_BYTES, Setup
from analyzer.tables.complexity import expected_distinct

DELTA_CHUNK = 64
"""Tokens per chunk of the delta rule in prefill, as in common kernels."""


@dataclass(frozen=True)
class WorkItem:
    """One kind of work, for one micro-batch and one layer; it occurs in `times` layers.

    `stage`: attention | experts | outside (embedding and head). Bytes are those moved per device.
    """

    name: str
    stage: str
    times: int
    flops: float
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    compute_s: float
    memory_s: float
    source: str
    warnings: tuple[str, ...] = ()
    launch_s: float = 0.0

    @property
    def moved(self) -> float:
        """Bytes."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def seconds(self) -> float:
        """Time of one layer."""
        return self.launch_s + max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        """The limiting resource."""
        return "compute" if self.compute_s >= self.memory_s else "memory"

    def described(self) -> str:
        """The source of the time, as text."""
        launch = f"; launch {self.launch_s * 1e6:.1f} us" if self.launch_s else ""
        if self.bound == "compute":
            return self.source + launch
        return f"bytes / {self.moved / self.memory_s / 1e9:.4g} GB/s; computing: {self.source}{launch}"


@dataclass(frozen=True)
class UnitPeak:
    """The compute unit, with its peak in the model's type."""

    device: Device
    unit: Unit
    dtype: str
    peak: float
    bandwidth: float

    @property
    def input_bytes(self) -> float:
        """Bytes of a number that goes into a product; its result has 16 bits."""
        return 1.0 if self.dtype in ("fp8", "int8") else 2.0

    def part(
        self, name: str, stage: str, times: int, flops: float, moved: tuple[float, float, float], measured: CurveValue | None
    ) -> WorkItem:
        """A part from its operations and (weight, KV, activation) bytes; without a measured MFU the profile's is used."""
        kind = f"{self.dtype} peak {self.peak / 1e12:.4g} T/s"
        answer = measured or CurveValue(self.unit.mfu, f"MFU {self.unit.mfu} of the device profile: no measured table for this")
        source = f"MFU {answer.value:.3f} of {kind}: {answer.source}" if measured else answer.source
        bandwidth = self.bandwidth
        if answer.of_roofline:
            bandwidth = self.device.bandwidth * answer.value
            source = f"{answer.value:.3f} of the roofline ({kind}, {self.device.bandwidth / 1e9:.4g} GB/s): {answer.source}"
        compute = flops / (self.peak * answer.value)
        seconds = compute, sum(moved) / bandwidth
        return WorkItem(name, stage, times, flops, *moved, *seconds, source, answer.warnings, answer.launch_s)


def unit_peak(device: Device, model: Model, setup: Setup) -> UnitPeak:
    """The unit in `setup`, or the device's first one, with the model's compute type."""
    name = setup.unit or next(iter(device.units))
    if name not in device.units:
        raise PredictError(f"{device.name} has no unit {name!r}: choose one of {', '.join(device.units)}")
    unit, dtype = device.units[name], model.storage.compute
    if dtype not in unit.peak:
        dtype = "fp16" if "fp16" in unit.peak else next(iter(unit.peak))
    bandwidth = min(device.bandwidth * device.efficiency, unit.bandwidth or float("inf"))
    return UnitPeak(device, unit, dtype, unit.peak[dtype], bandwidth)


def work_items(model: Model, on: UnitPeak, setup: Setup) -> list[WorkItem]:
    """All parts of a step for one micro-batch."""
    rows = setup.tokens / setup.turns
    step_parts = attention_products(model, on, setup, rows) + attention_core(model, on, setup)
    if model.mamba:
        step_parts += mamba(model, model.mamba.shared_by(setup.tp), on, setup, rows)
    if model.delta:
        step_parts += delta_net(model, model.delta, on, setup, rows)
    routed = sum(model.routed)
    if model.dense_layers:
        step_parts += feed_forward(model, on, "dense", model.dense_layers, rows, model.dense_width / setup.tp)
    if model.mixture:
        step_parts += router_gate(model, model.mixture, on, rows) + routed_experts(model, model.mixture, on, setup, rows)
        if model.mixture.shared_width:
            step_parts += feed_forward(model, on, "shared experts", routed, rows, model.mixture.shared_width)
    return step_parts + output_head(model, on, setup)


def matrix_product(on: UnitPeak, name: str, stage: str, times: int, m: float, k: float, n: float, bits: float) -> WorkItem:
    """A matrix product [m, k] x [k, n] with `bits` per weight."""
    moved = (k * n * bits / 8, 0.0, m * (on.input_bytes * k + 2.0 * n))
    return on.part(name, stage, times, 2 * m * k * n, moved, mfu.efficiency_at(mfu.gemm_curves(on.device.tables), (k, n), m))


def attention_products(model: Model, on: UnitPeak, setup: Setup, rows: float) -> list[WorkItem]:
    """The projections around attention; heads are shared by `tp` devices."""
    bits, made = model.storage.linear, []
    for a, times in Counter(map(model.attention_of, model.windows)).items():
        kind = ", all seen" if a is model.wide else ""
        shapes = product_shapes(a, model.hidden, setup.tp, on_latent_cache(a, setup))
        made += [matrix_product(on, name + kind, "attention", times, rows, k, n, bits) for name, (k, n) in shapes.items()]
    return made


def on_latent_cache(a: Attention, setup: Setup) -> bool:
    """Whether MLA works on its compressed cache: in decode, and if each query attends to separately chosen tokens."""
    return setup.phase == "decode" or indexer_selects(a, setup)


def indexer_selects(a: Attention, setup: Setup) -> bool:
    """Whether an indexer excludes cached tokens at this context."""
    return a.indexer is not None and setup.context > a.indexer.top_k


def product_shapes(a: Attention, hidden: int, tp: int, folded: bool) -> dict[str, tuple[float, float]]:
    """Name → (k, n) of one layer's projections."""
    return mla_products(a, hidden, tp, folded) if a.mla else gqa_products(a, hidden, tp)


def gqa_products(a: Attention, hidden: int, tp: int) -> dict[str, tuple[float, float]]:
    """Name → (k, n); q, k, v and the output gate, if there is one, are one product."""
    return {
        "attention qkv": (hidden, (a.heads * (1 + a.gated) + (2 - a.tied_values) * a.kv_heads) * a.head_dim / tp),
        "attention out": (a.heads * a.head_dim / tp, hidden),
    }


def mla_products(a: Attention, hidden: int, tp: int, folded: bool) -> dict[str, tuple[float, float]]:
    """Name → (k, n). If folded, the expansion of keys and values is part of query and output; else the cache is expanded.

    The folded products are one small product per head. Both are looked up as [heads·dim, rank], which has their operations and
    weights; [heads·rank, dim], the alternative for the second, would be a reduction over all heads, which no engine runs.
    """
    heads = a.heads / tp
    query = {"attention q": (hidden, heads * (a.nope + a.rope))}
    if a.q_rank:
        query = {"attention q down": (hidden, a.q_rank), "attention q up": (a.q_rank, heads * (a.nope + a.rope))}
    per_head = {"attention q to cache": (heads * a.nope, a.kv_rank), "attention cache to out": (heads * a.value_dim, a.kv_rank)}
    expanded = {"attention kv up": (a.kv_rank, heads * (a.nope + a.value_dim))}
    return {
        **query,
        "attention kv down": (hidden, a.kv_rank + a.rope),
        **(per_head if folded else expanded),
        "attention out": (heads * a.value_dim, hidden),
        **(index_products(a.indexer, hidden, a.q_rank) if a.indexer else {}),
    }


def index_products(index: Indexer, hidden: int, q_rank: int) -> dict[str, tuple[float, float]]:
    """Name → (k, n). Every device has the whole indexer, since all need the same choice."""
    return {
        "index q": (q_rank, index.heads * index.dim),
        "index k": (hidden, index.dim),
        "index weights": (hidden, index.heads),
    }


def attention_core(model: Model, on: UnitPeak, setup: Setup) -> list[WorkItem]:
    """Scores and weighted values, once for each distinct window."""
    if model.attention.indexer and indexer_selects(model.attention, setup):
        return [index_scores(model, model.attention.indexer, on, setup), chosen_core(model, model.attention.indexer, on, setup)]
    counted = {window: model.windows.count(window) for window in dict.fromkeys(model.windows)}
    return [attention_scores(model, on, setup, window, times) for window, times in counted.items()]


def index_scores(model: Model, index: Indexer, on: UnitPeak, setup: Setup) -> WorkItem:
    """A score for every query and earlier token, in fp8 if the unit supports it; keys are stored in fp8, each with a scale.

    Selection of the best scores is counted as writing and reading them.
    """
    sequences, queries, pairs = _micro_batch_queries(setup)
    operations = 2.0 * index.heads * index.dim
    table = mfu.index_scores(on.device.tables, setup.phase, (index.heads, index.dim), operations)
    answer = mfu.efficiency_at(table, (sequences if setup.phase == "decode" else setup.context,), setup.context)
    moved = (0.0, sequences * setup.context * index_key_bytes(index), sequences * (queries * index.dim * index.heads + 8 * pairs))
    unit = _in_type(on, "fp8")
    return unit.part("index scores", "attention", len(model.windows), operations * pairs * sequences, moved, answer)


def chosen_core(model: Model, index: Indexer, on: UnitPeak, setup: Setup) -> WorkItem:
    """Scores and weighted values of the chosen tokens, on the compressed cache."""
    a, (sequences, queries, _) = model.attention, _micro_batch_queries(setup)
    heads, per_pair = a.heads / setup.tp, 2 * a.heads / setup.tp * (2 * a.kv_rank + a.rope)
    first = index.top_k if setup.phase == "prefill" else 0
    pairs = first**2 / 2 + (queries - first) * index.top_k
    table = mfu.chosen_attention(on.device.tables, setup.phase, (int(heads), a.kv_rank + a.rope, index.top_k), per_pair)
    answer = mfu.efficiency_at(table, (sequences if setup.phase == "decode" else setup.context,), setup.context)
    cached = sequences * (setup.context if setup.phase == "prefill" else index.top_k) * a.cached() * KV_BYTES[setup.kv]
    moved = (0.0, cached, 2 * sequences * queries * heads * (2 * a.kv_rank + a.rope))
    name = f"attention core, {index.top_k} chosen"
    return _at_16_bit(on).part(name, "attention", len(model.windows), per_pair * pairs * sequences, moved, answer)


def index_key_bytes(index: Indexer) -> float:
    """Bytes of an indexer key, per cached token and layer."""
    return index.dim + 4.0


def _micro_batch_queries(setup: Setup) -> tuple[float, float, float]:
    """(sequences of a micro-batch, queries of each, pairs of a query and an earlier token)."""
    if setup.phase == "decode":
        return setup.batch / setup.turns, 1.0, float(setup.context)
    return setup.batch / setup.turns, float(setup.context), setup.context**2 / 2


def delta_net(model: Model, delta: DeltaNet, on: UnitPeak, setup: Setup, rows: float) -> list[WorkItem]:
    """The projections, and convolution with the delta rule as one part; heads are shared by `tp` devices."""
    times, tp, bits = model.delta_layers, setup.tp, model.storage.linear
    shapes = delta_products(delta, model.hidden, tp)
    projections = [matrix_product(on, name, "attention", times, rows, k, n, bits) for name, (k, n) in shapes.items()]
    prefill = setup.phase == "prefill"
    per_token = 2.0 * delta.kernel * delta.channels + delta_rule_flops(delta, prefill)
    x = setup.context if prefill else setup.batch / setup.turns
    shape = (delta.kernel, delta.key_heads // tp, delta.key_dim, delta.value_heads // tp, delta.value_dim)
    answer = mfu.efficiency_at(mfu.delta_rule(on.device.tables, setup.phase, shape, per_token / tp), (1.0,), x)
    states = setup.batch / setup.turns * delta.state_bytes() / tp * (1 if prefill else 2)
    moved = (0.0, states, rows * 2.0 * (delta.channels + delta.value_heads * delta.value_dim) / tp)
    core = _at_16_bit(on).part("delta rule", "attention", times, rows * per_token / tp, moved, answer)
    return [*projections, core]


def mamba(model: Model, layer: Mamba2, on: UnitPeak, setup: Setup, rows: float) -> list[WorkItem]:
    """The projections, and convolution with the state as one part, of a layer as one device has it."""
    times, bits, prefill = model.delta_layers, model.storage.linear, setup.phase == "prefill"
    shapes = mamba_products(layer, model.hidden)
    projections = [matrix_product(on, name, "attention", times, rows, k, n, bits) for name, (k, n) in shapes.items()]
    flops = rows * mamba_flops(layer, min(layer.chunk, setup.context) if prefill else 0)
    states = setup.batch / setup.turns * layer.state_bytes() * (1 if prefill else 2)
    moved = (0.0, states, rows * 2.0 * (layer.channels + layer.inner))
    return [*projections, _at_16_bit(on).part("state space", "attention", times, flops, moved, None)]


def mamba_products(layer: Mamba2, hidden: int) -> dict[str, tuple[float, float]]:
    """Name → (k, n); gate, convolved channels and step sizes are one product."""
    return {"state in": (hidden, layer.inner + layer.channels + layer.heads), "state out": (layer.inner, hidden)}


def mamba_flops(layer: Mamba2, chunk: int) -> float:
    """Operations of convolution and state per token, over all heads; in chunks of this many tokens, 0: token by token."""
    convolution, numbers = 2.0 * layer.kernel * layer.channels, float(layer.inner * layer.state)
    if not chunk:
        return convolution + 5.0 * numbers
    return convolution + 4.0 * numbers + 2.0 * chunk * (layer.inner + layer.groups * layer.state)


def delta_products(delta: DeltaNet, hidden: int, tp: int) -> dict[str, tuple[float, float]]:
    """Name → (k, n); queries, keys, values, output gate, decay and step size are one product, but for gates of a lower rank."""
    values, rank = delta.value_heads * delta.value_dim, delta.gate_rank
    if rank:
        return {
            "delta in": (hidden, (delta.channels + delta.value_heads) / tp),
            "delta gates down": (hidden, 2 * rank),
            "delta gates up": (rank, 2 * values / tp),
            "delta out": (values / tp, hidden),
        }
    return {
        "delta in": (hidden, (delta.channels + values + 2 * delta.value_heads) / tp),
        "delta out": (values / tp, hidden),
    }


def delta_rule_flops(delta: DeltaNet, chunked: bool) -> float:
    """Operations of the delta rule per token, over all heads."""
    k, v = delta.key_dim, delta.value_dim
    in_chunk = DELTA_CHUNK * (6.0 * k + 4.0 * v) if chunked else 0.0
    return delta.value_heads * (6.0 * k * v + in_chunk)


def attention_scores(model: Model, on: UnitPeak, setup: Setup, window: int | None, times: int) -> WorkItem:
    """Attention of one query per sequence to its cache, or causal attention within each prompt."""
    a, tables, length, decode = model.attention_of(window), on.device.tables, setup.context, setup.phase == "decode"
    heads, sequences, visible = a.heads / setup.tp, setup.batch / setup.turns, min(length, window or length)
    latent = 2 * a.kv_rank + a.rope if decode else a.nope + a.rope + a.value_dim
    per_pair = 2 * heads * latent if a.mla else 4 * heads * a.head_dim
    pairs, queries, kept = (visible, 1, visible) if decode else (visible**2 / 2 + (length - visible) * visible, length, length)
    cached = sequences * kept * a.cached() * KV_BYTES[setup.kv] / (1 if a.mla else min(setup.tp, a.kv_heads))
    shape, kv_type = _shape_name(a, setup.tp, decode), "fp8" if setup.kv in ("fp8", "int8") else "bf16"
    if decode:
        numbers = a.cached() / (1 if a.mla else min(setup.tp, a.kv_heads))
        answer = mfu.efficiency_at(mfu.decode_attention(tables, shape, kv_type, per_pair, numbers), (sequences,), visible)
    else:
        answer = mfu.efficiency_at(mfu.prefill_attention(tables, shape, per_pair), (1.0,), visible)
    moved = (0.0, cached, 2 * sequences * queries * heads * a.head_dim * 2)
    name = "attention core" if window is None else f"attention core, window {window}"
    return _at_16_bit(on).part(name, "attention", times, per_pair * sequences * pairs, moved, answer)


def router_gate(model: Model, mixture: Mixture, on: UnitPeak, rows: float) -> list[WorkItem]:
    """The routing gate, in 16 bit."""
    times = sum(model.routed)
    return [matrix_product(_at_16_bit(on), "router", "experts", times, rows, model.hidden, mixture.experts, 16.0)]


def routed_experts(model: Model, mixture: Mixture, on: UnitPeak, setup: Setup, rows: float) -> list[WorkItem]:
    """Routed experts of one device: its share of the group's routed rows; time is at least that of reading the chosen experts."""
    local = mixture.experts / setup.ep
    used = expected_distinct(mixture.experts, mixture.top_k, rows * setup.ep) / setup.ep
    pairs, width, hidden = rows * mixture.top_k, float(mixture.width), float(model.hidden)
    widths = {"up": model.ups * width, "down": width}
    reads = f"; reads {used:.1f} of {local:.0f} experts, N(1-((N-k)/N)^B)"
    projections = []
    for projection, n in widths.items():
        answer = mfu.efficiency_at(
            mfu.grouped_gemm_curves(on.device.tables, setup.phase, projection), (local, hidden, width), pairs / local
        )
        moved = (used * hidden * n * model.storage.expert / 8, 0.0, pairs * (on.input_bytes * hidden + 2.0 * n))
        part = on.part(f"experts {projection}", "experts", sum(model.routed), 2 * pairs * hidden * n, moved, answer)
        projections.append(replace(part, source=part.source + reads))
    return projections


def output_head(model: Model, on: UnitPeak, setup: Setup) -> list[WorkItem]:
    """Logits of the last token of every sequence."""
    rows = setup.batch / setup.turns
    bits, n = model.storage.head, model.vocabulary / setup.tp
    return [matrix_product(_at_16_bit(on), "head", "outside", 1, rows, model.hidden, n, bits)]


def feed_forward(model: Model, on: UnitPeak, name: str, times: int, rows: float, width: float) -> list[WorkItem]:
    """Feed-forward layers that every token takes, `width` wide on each device."""
    bits = model.storage.linear
    up = matrix_product(on, f"{name} up", "experts", times, rows, model.hidden, model.ups * width, bits)
    return [up, matrix_product(on, f"{name} down", "experts", times, rows, width, model.hidden, bits)]


def _at_16_bit(on: UnitPeak) -> UnitPeak:
    """The same unit computing in 16 bit, if supported: attention, router and head are not quantized."""
    return on if on.dtype in ("fp16", "fp32") else _in_type(on, "fp16")


def _in_type(on: UnitPeak, dtype: str) -> UnitPeak:
    """The same unit computing in another type, if supported."""
    return UnitPeak(on.device, on.unit, dtype, on.unit.peak[dtype], on.bandwidth) if dtype in on.unit.peak else on


def _shape_name(a: Attention, tp: int, decode: bool) -> str:
    """The name of a shape in the attention tables."""
    heads = a.heads // tp
    if a.mla:
        return f"mla/{heads}-{a.kv_rank}-{a.rope}" if decode else f"mla/{heads}-{a.nope}-{a.rope}"
    return f"mha/{heads}-{max(a.kv_heads // tp, 1)}-{a.head_dim}"
