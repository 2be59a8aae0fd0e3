"""A predicted step: its parts, communication and summary figures."""

from dataclasses import dataclass
from typing import Any

from analyzer.errors import PredictError
from analyzer.model import Model
from analyzer.predict import links, roofline
from analyzer.predict.devices import Device, Unit
from analyzer.predict.setup import KV_BYTES, Setup

NOTABLE = 0.02
"""Parts below this share of a step cause no warning when they lie outside the measured range."""


@dataclass(frozen=True)
class Prediction:
    """One step of `setup` on `device`. `parts` and `transfers` are per micro-batch and layer."""

    model: Model
    device: Device
    setup: Setup
    parts: list[roofline.WorkItem]
    transfers: list[links.Transfer]
    seconds: float
    formula: str
    weight_bytes: float
    kv_bytes: float
    warnings: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and device."""
        return self.setup.tokens / self.seconds

    @property
    def unit(self) -> Unit:
        """The compute unit."""
        return roofline.unit_peak(self.device, self.model, self.setup).unit

    def rows(self) -> list[dict[str, Any]]:
        """One row per part and transfer with its source; times in microseconds per layer and milliseconds per step."""
        turns, routed = self.setup.turns, sum(self.model.routed) or self.model.layers
        columns = ("part", "layers", "gflop", "weight_bytes", "kv_bytes", "us", "step_ms", "bound", "source")
        rows: list[tuple[Any, ...]] = []
        for p in self.parts:
            times = p.seconds * 1e6, p.seconds * p.times * turns * 1e3
            rows.append((p.name, p.times, p.flops / 1e9, p.weight_bytes, p.kv_bytes, *times, p.bound, p.described()))
        for t in self.transfers:
            layers = self.model.layers if t.name == "all-reduce" else routed
            rows.append((t.name, layers, 0.0, 0.0, 0.0, t.seconds * 1e6, t.seconds * layers * turns * 1e3, "link", t.source))
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def summary(self) -> dict[str, Any]:
        """Figures of the step, JSON-able."""
        per_sequence = self.kv_bytes / self.setup.batch
        return {
            "model": self.model.name,
            "device": self.device.name,
            "phase": self.setup.phase,
            "tokens": self.setup.tokens,
            ("ttft_ms" if self.setup.phase == "prefill" else "tpot_ms"): self.seconds * 1e3,
            "tokens_per_s": self.tokens_per_s,
            "formula": self.formula,
            "weights": self.model.storage.text,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "kv_bytes_per_sequence": per_sequence,
            "memory_bytes": self.device.memory_bytes,
            "warnings": list(self.warnings),
        }


def predict_step(model: Model, device: Device, setup: Setup) -> Prediction:
    """The step's time from the roofline of its parts, communication and the scheduler's allowance."""
    _check_shares(model, setup)
    on = roofline.unit_peak(device, model, setup)
    parts = roofline.work_items(model, on, setup)
    rows = setup.tokens / setup.turns
    reduced = links.all_reduce(device, setup, rows, model.hidden)
    sent = received = links.NOTHING
    if model.mixture:
        sent, received = (links.all_to_all(n, device, model.mixture, setup, rows, model.hidden) for n in links.NUMBER_BYTES)
    seconds, formula = _step_seconds(model, device, setup, parts, sent, received)
    seconds += reduced.seconds * model.layers * setup.turns + device.step_overhead_ms.get(setup.phase, 0.0) / 1e3
    weights = weight_bytes(model, setup)
    cache = kv_bytes(model, setup)
    return Prediction(
        model, device, setup, parts, [t for t in (sent, received, reduced) if t.bytes], seconds, formula, weights, cache,
        _reliability_warnings(model, device, setup, on, parts, weights + cache),
    )  # fmt: skip


def _check_shares(model: Model, setup: Setup) -> None:
    """Refuse groups that cannot share the heads or experts."""
    for a in {model.attention_of(window) for window in model.windows}:
        if a.heads % setup.tp:
            raise PredictError(f"--tp {setup.tp} devices cannot share {a.heads} heads evenly: give a divisor")
    if model.delta and (model.delta.value_heads % setup.tp or model.delta.key_heads % setup.tp):
        raise PredictError(
            f"--tp {setup.tp} devices cannot share {model.delta.key_heads} linear key heads evenly: give a divisor"
        )
    if model.mamba and (model.mamba.heads % setup.tp or model.mamba.shared_by(setup.tp).groups * setup.tp % model.mamba.groups):
        heads = f"{model.mamba.heads} Mamba heads in {model.mamba.groups} groups"
        raise PredictError(f"--tp {setup.tp} devices cannot share {heads} evenly: give a divisor")
    if model.mixture and setup.ep > model.mixture.experts:
        raise PredictError(f"--ep {setup.ep} devices are more than the model's {model.mixture.experts} experts")


def weight_bytes(model: Model, setup: Setup) -> float:
    """Bytes of the weights on one device: embedding, head, its attention heads, its experts."""
    hidden, s = model.hidden, model.storage
    each = [roofline.product_shapes(model.attention_of(window), hidden, setup.tp, folded=False) for window in model.windows]
    attention = sum(k * n for shapes in each for k, n in shapes.values()) * s.linear / 8
    shapes = roofline.delta_products(model.delta, hidden, setup.tp) if model.delta else {}
    shapes |= roofline.mamba_products(model.mamba.shared_by(setup.tp), hidden) if model.mamba else {}
    attention += model.delta_layers * sum(k * n for k, n in shapes.values()) * s.linear / 8
    routed, total = sum(model.routed), attention + 2 * model.vocabulary * hidden / setup.tp * s.head / 8
    total += model.dense_layers * (model.ups + 1) * hidden * model.dense_width / setup.tp * s.linear / 8
    if model.mixture:
        m = model.mixture
        total += routed * (model.ups + 1) * hidden * (m.experts / setup.ep * m.width * s.expert + m.shared_width * s.linear) / 8
    return total


def kv_bytes(model: Model, setup: Setup) -> float:
    """Bytes of the caches of a device's sequences at the step's context: keys and values, indexer keys, recurrent states."""
    each = 0.0
    for window in model.windows:
        a, cached_tokens = model.attention_of(window), min(setup.context, window or setup.context)
        each += cached_tokens * a.cached() * KV_BYTES[setup.kv] / (1 if a.mla else min(setup.tp, a.kv_heads))
        each += cached_tokens * roofline.index_key_bytes(a.indexer) if a.indexer else 0.0
    each += model.delta_layers * model.delta.state_bytes() / setup.tp if model.delta else 0.0
    each += model.delta_layers * model.mamba.shared_by(setup.tp).state_bytes() if model.mamba else 0.0
    return setup.batch * each


def _step_seconds(
    model: Model, device: Device, setup: Setup, parts: list[roofline.WorkItem], sent: links.Transfer, received: links.Transfer
) -> tuple[float, str]:
    """(seconds of all layers and the head, formula of a layer)."""
    routed = sum(model.routed)
    attention = sum(p.seconds * p.times for p in parts if p.stage == "attention") / model.layers
    dense = sum(p.seconds for p in parts if p.name.startswith("dense"))
    experts = sum(p.seconds for p in parts if p.stage == "experts" and not p.name.startswith("dense"))
    outside = sum(p.seconds for p in parts if p.stage == "outside") * setup.turns
    layer_seconds, formula = links.layer_time(attention, experts, sent.seconds, received.seconds, setup, device.overlap_share)
    plain = attention * setup.turns * (model.layers - routed) + dense * setup.turns * model.dense_layers
    exposed = (sent.seconds + received.seconds) if setup.turns > 1 else 0.0
    return layer_seconds * routed + plain + outside + exposed, formula


def _reliability_warnings(
    model: Model, device: Device, setup: Setup, on: roofline.UnitPeak, parts: list[roofline.WorkItem], needed: float
) -> tuple[str, ...]:
    """Warnings about the prediction's reliability."""
    total = sum(part.seconds * part.times for part in parts)
    heavy = [part for part in parts if part.seconds * part.times > NOTABLE * total]
    warnings = [f"{part.name}: {text}" for part in heavy for text in part.warnings]
    if device.estimates:
        warnings.append(f"{device.name}: estimated, not published: {', '.join(device.estimates)}")
    if on.dtype != model.storage.compute:
        warnings.append(f"{device.name} has no {model.storage.compute} peak: {on.dtype}'s is used")
    if device.tables and on.dtype not in ("fp8",):
        warnings.append(
            f"matrix products were measured in fp8: their efficiency is applied to the {on.dtype} peak and these bytes"
        )
    if model.mixture and model.mixture.experts % setup.ep:
        warnings.append(f"{model.mixture.experts} experts do not divide evenly among {setup.ep} devices: the mean is used")
    if model.context and setup.context > model.context:
        warnings.append(f"context {setup.context} exceeds the model's {model.context}")
    if needed > device.memory_bytes:
        warnings.append(f"weights and KV cache take {needed / 1e9:.1f} GB, the device has {device.memory_bytes / 1e9:.0f} GB")
    return tuple(dict.fromkeys(warnings))
