"""Shapes for a roofline from a Hugging Face config: attention, feed-forward and bytes per weight of every layer."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from analyzer.errors import PredictError
from moescope.packaged import toml_beside

FIELDS = toml_beside(__file__, "model.toml")
ALIASES: dict[str, list[str]] = FIELDS["aliases"]
NOT_MODELLED: dict[str, str] = FIELDS["not_modelled"]
BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.5, "mxfp4": 4.25}
"""Storage bits of a weight. int4: groups of 32 with a 16-bit scale; mxfp4: blocks of 32 with an 8-bit scale."""

FAMILIES: dict[str, list[str]] = FIELDS["families"]
FULL_EVERY: dict[str, int] = FIELDS["full_every"]
FAMILIES_NOT_MODELLED: dict[str, str] = FIELDS["families_not_modelled"]

MAMBA_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Names of layers in published configs of families with Mamba-2 layers, and ours."""
PATTERN = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
"""Letters of hybrid_override_pattern, and ours."""
STATES = ("mamba_d_state", "ssm_state_size", "layers_block_type", "hybrid_override_pattern")
"""Fields that are modelled of families with Mamba-2 layers."""
ATTENTION = ("full_attention", "sliding_attention")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Indexer:
    """The indexer of DeepSeek's sparse attention: chooses `top_k` cached tokens per query by `heads` scores of `dim` numbers."""

    heads: int
    dim: int
    top_k: int


@dataclass(frozen=True)
class DeltaNet:
    """Linear attention by the gated delta rule: a state [key_dim, value_dim] for each value head, after a short convolution.

    gate_rank: above 0, states fade by channel, and decays and output gates pass through as many dimensions.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int
    gate_rank: int = 0

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self) -> float:
        """Bytes per sequence and layer: the state in fp32, the convolution's last inputs in 16 bit."""
        return 4.0 * self.value_heads * self.key_dim * self.value_dim + 2.0 * self.channels * (self.kernel - 1)


@dataclass(frozen=True)
class Mamba2:
    """A Mamba-2 layer: a state [dim, state] for each head after a short convolution; `groups` of heads share the state's inputs.

    chunk: tokens that kernels take together in prefill.
    """

    heads: int
    dim: int
    groups: int
    state: int
    kernel: int
    chunk: int

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of the heads, and what enters and reads the states."""
        return self.inner + 2 * self.groups * self.state

    def shared_by(self, devices: int) -> "Mamba2":
        """The part of one of several devices; those that share a group of heads all have its inputs."""
        return replace(self, heads=self.heads // devices, groups=max(self.groups // devices, 1))

    def state_bytes(self) -> float:
        """Bytes per sequence and layer: the state in fp32, the convolution's last inputs in 16 bit."""
        return 4.0 * self.inner * self.state + 2.0 * self.channels * (self.kernel - 1)


@dataclass(frozen=True)
class Attention:
    """Attention over cached tokens. MLA if `kv_rank` > 0: the cache then has `kv_rank` + `rope` numbers per token.

    gated: the output is multiplied by a gate as wide as the queries. indexer: attention to chosen tokens only. tied_values: the
    key projection is also used for values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    q_rank: int = 0
    kv_rank: int = 0
    nope: int = 0
    rope: int = 0
    value_dim: int = 0
    gated: bool = False
    indexer: Indexer | None = None
    tied_values: bool = False

    @property
    def mla(self) -> bool:
        """Whether this is latent attention."""
        return self.kv_rank > 0

    def cached(self) -> int:
        """Cached numbers per token and layer."""
        return self.kv_rank + self.rope if self.mla else 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Mixture:
    """A routed feed-forward layer. `shared_width`: total width of all shared experts, 0 for none."""

    experts: int
    top_k: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True)
class Storage:
    """Bits per weight, by part, and the type of matrix products (fp16 includes bf16)."""

    linear: float
    expert: float
    head: float
    compute: str
    text: str


@dataclass(frozen=True)
class Model:
    """A decoder. `windows`: attention window of each layer with attention, None for unlimited; `routed[i]`: layer i has experts.

    `delta` or `mamba`: replaces attention in the layers `delta_at`. `wide`: attention of the layers without a window, if
    it differs. `ups`: matrices before the activation of a feed-forward part, 2 if it is gated. `bare`: layers without such a part
    in models whose layers are one part each.
    """

    name: str
    hidden: int
    vocabulary: int
    context: int
    attention: Attention
    dense_width: int
    mixture: Mixture | None
    windows: tuple[int | None, ...]
    routed: tuple[bool, ...]
    storage: Storage
    delta: DeltaNet | None = None
    mamba: Mamba2 | None = None
    delta_at: frozenset[int] = frozenset()
    wide: Attention | None = None
    ups: int = 2
    bare: frozenset[int] = frozenset()

    def attention_of(self, window: int | None) -> Attention:
        """The attention of layers with this window."""
        return self.wide if self.wide and window is None else self.attention

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.routed)

    @property
    def dense_layers(self) -> int:
        """Number of layers with a feed-forward part without experts."""
        return self.layers - sum(self.routed) - len(self.bare)

    @property
    def delta_layers(self) -> int:
        """Number of layers without attention over cached tokens."""
        return len(self.delta_at)


class ConfigFields:
    """A config; errors name missing fields."""

    def __init__(self, values: dict[str, Any], path: Path):
        self.values, self.path = values, path

    def number(self, name: str, default: int | None = None, most: int = 10**9, least: int = 0) -> int:
        """A whole number by our name or one of the config's names, from `least` to `most`."""
        names = ALIASES.get(name, [name])
        value = next((self.values[n] for n in names if self.values.get(n) is not None), default)
        if value is None:
            raise PredictError(f"{self.path}: field {' or '.join(names)} is missing: add it, or give another model's config.json")
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most or value % 1:
            found = next((n for n in names if self.values.get(n) is not None), names[0])
            raise PredictError(f"{self.path}: field {found} is {value!r}: a whole number from {least} to {most:,} is needed")
        return int(value)

    def named(self, name: str) -> str:
        """The config's name of a field that it has."""
        return next((n for n in ALIASES.get(name, [name]) if self.values.get(n) is not None), name)

    def refuse(self, text: str) -> NoReturn:
        """Raise PredictError about the config."""
        raise PredictError(f"{self.path}: {text}")

    def is_of(self, families: str) -> bool:
        """Whether the model type is one of a list of FAMILIES."""
        return self.values.get("model_type") in FAMILIES[families]

    def has(self, name: str) -> bool:
        """Whether any of the field's names is present with a value other than 0."""
        return any(self.values.get(n) not in (None, 0) for n in ALIASES.get(name, [name]))


def read_config(path: Path) -> Model:
    """The model of a config.json, or of a folder with one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise PredictError(f"{file} is not valid JSON ({error}): give a Hugging Face config.json") from None
    if not isinstance(values, dict):
        raise PredictError(f"{file} holds no JSON object: give a Hugging Face config.json")
    return model_of(values, file)


def model_of(values: dict[str, Any], file: Path) -> Model:
    """The model of a parsed config.json; errors name `file`."""
    inner = values.get("text_config")
    fields = ConfigFields({**values, **inner} if isinstance(inner, dict) else values, file)
    _refuse_what_is_not_modelled(fields)
    single = fields.is_of("single_part")
    listed = _single_parts(fields) if single else []
    layers = len(listed) or fields.number("num_hidden_layers", most=10**5, least=1)
    mixture = _read_mixture(fields)
    kinds = listed or _layer_kinds(fields, layers)
    delta_at = frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    attention = _read_attention(fields)
    routed = _routed_layers(fields, layers) if mixture and not single else tuple(kind == "moe" for kind in kinds)
    mamba = fields.is_of("mamba2")
    dense_width = "shared_width" if fields.is_of("dense_as_shared") else "dense_width"
    made = Model(
        name=str(values.get("_name_or_path") or values.get("model_type") or file.stem),
        hidden=fields.number("hidden_size", least=1),
        vocabulary=fields.number("vocab_size", least=1),
        context=fields.number("max_position_embeddings", 0),
        attention=attention,
        dense_width=fields.number(dense_width, 0 if mixture else None),
        mixture=mixture,
        windows=_layer_windows(fields, kinds),
        routed=routed,
        storage=_read_storage(fields),
        delta=_read_delta_net(fields) if delta_at and not mamba else None,
        mamba=_read_mamba(fields) if delta_at and mamba else None,
        delta_at=delta_at,
        wide=_read_global_attention(fields, kinds),
        ups=1 if fields.is_of("ungated") else 2,
        bare=frozenset(layer for layer, kind in enumerate(kinds) if kind not in ("moe", "mlp")) if single else frozenset(),
    )
    if made.dense_layers and not made.dense_width:
        fields.refuse(f"{made.dense_layers} of {layers} layers have no experts: intermediate_size must give their width")
    return made


def with_weights(model: Model, weights: str) -> Model:
    """The model with all linear layers and experts stored as `weights` (a key of BITS); the head keeps its type."""
    compute = weights if weights in ("fp8", "int8", "fp32") else "fp16"
    return replace(
        model, storage=replace(model.storage, linear=BITS[weights], expert=BITS[weights], compute=compute, text=weights)
    )


def _refuse_what_is_not_modelled(fields: ConfigFields) -> None:
    present = {name: what for name, what in NOT_MODELLED.items() if _says_something(fields.values.get(name))}
    if fields.is_of("mamba2"):
        present = {name: what for name, what in present.items() if name not in STATES}
    if fields.is_of("channel_decay"):
        present.pop("linear_attn_config", None)
    kinds = fields.values.get("attn_type_list")
    if isinstance(kinds, list) and all(kind == 1 for kind in kinds):  # softmax attention in every layer (MiniMax-M2)
        present.pop("attn_type_list", None)
    heads = fields.values.get("num_attention_heads_per_layer")
    if isinstance(heads, list) and all(each == fields.values.get("num_attention_heads") for each in heads):
        present.pop("num_attention_heads_per_layer", None)
    if fields.has("index_topk") and not fields.has("kv_lora_rank"):
        present["index_topk"] = "indexed attention without a latent cache"
    elif fields.has("index_topk") and not fields.has("q_lora_rank"):
        present["index_topk"] = "indexed attention without latent queries"
    family = str(fields.values.get("model_type"))
    if family in FAMILIES_NOT_MODELLED:
        present[family] = FAMILIES_NOT_MODELLED[family]
    if present:
        listed = ", ".join(f"{name} ({what})" for name, what in present.items())
        raise PredictError(f"{fields.path}: {listed} is not modelled, so a prediction would ignore it")


def _says_something(value: Any) -> bool:
    """Whether a field's value changes anything: lists of zeros do not."""
    return any(map(_says_something, value)) if isinstance(value, list) else bool(value)


def _read_attention(fields: ConfigFields) -> Attention:
    heads = fields.number("num_attention_heads", least=1)
    if fields.has("kv_lora_rank"):
        nope, rope = fields.number("qk_nope_head_dim"), fields.number("qk_rope_head_dim")
        rank, values = fields.number("kv_lora_rank", least=1), fields.number("v_head_dim", least=1)
        if nope + rope == 0:
            fields.refuse("qk_nope_head_dim and qk_rope_head_dim are 0: a head has no keys")
        q_rank = fields.number("q_lora_rank", 0)
        return Attention(heads, heads, nope + rope, q_rank, rank, nope, rope, values, indexer=_read_indexer(fields))
    hidden, kv_heads = fields.number("hidden_size", least=1), fields.number("num_key_value_heads", heads, least=1)
    if heads % kv_heads:
        fields.refuse(f"num_attention_heads {heads} are not a multiple of num_key_value_heads {kv_heads}")
    if fields.values.get("head_dim") is None and hidden % heads:
        fields.refuse(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim")
    head_dim = fields.number("head_dim", hidden // heads, least=1)
    by_channel = fields.is_of("gated_attention") or fields.values.get("gating") in (False, "per-element")
    gated = bool(fields.values.get("attn_output_gate", by_channel))
    return Attention(heads, kv_heads, head_dim, value_dim=head_dim, gated=gated)


def _read_global_attention(fields: ConfigFields, kinds: list[str]) -> Attention | None:
    """Attention of the layers without a window in models with windows (Gemma 4), from keys for all layers or for each."""
    values = fields.values
    listed, tied = values.get("per_layer_config"), bool(values.get("attention_k_eq_v"))
    heads = {"head_dim": values.get("global_head_dim"), "num_key_value_heads": tied and values.get("num_global_key_value_heads")}
    if listed is not None:
        if not isinstance(listed, dict) or not all(isinstance(part, dict) and str(n).isdigit() for n, part in listed.items()):
            fields.refuse("per_layer_config must map layers to their fields")
        heads = next(iter(listed.values()), {})
        full = {layer for layer, kind in enumerate(kinds) if kind == "full_attention" and heads}
        if {int(layer) for layer in listed} != full or any(part != heads for part in listed.values()):
            raise PredictError(f"{fields.path}: per_layer_config is modelled where it changes all full_attention layers alike")
    heads = {name: value for name, value in heads.items() if value}
    if not heads and not tied:
        return None
    return replace(_read_attention(ConfigFields(values | heads, fields.path)), tied_values=tied)


def _read_indexer(fields: ConfigFields) -> Indexer | None:
    if not fields.has("index_topk"):
        return None
    return Indexer(*(fields.number(name, least=1) for name in ("index_n_heads", "index_head_dim", "index_topk")))


def _read_delta_net(fields: ConfigFields) -> DeltaNet:
    if fields.is_of("channel_decay"):
        inner = ConfigFields(fields.values | _linear_config(fields), fields.path)
        heads, dim = inner.number("linear_num_heads", 32, least=1), inner.number("linear_head_dim", 128, least=1)
        return DeltaNet(heads, dim, heads, dim, inner.number("linear_conv_kernel_dim", 4, least=1), gate_rank=dim)
    names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim")
    delta = DeltaNet(*(fields.number(f"linear_{name}", least=1) for name in names))
    if delta.value_heads % delta.key_heads:
        fields.refuse(f"linear_num_value_heads {delta.value_heads} are not a multiple of linear_num_key_heads {delta.key_heads}")
    return delta


def _linear_config(fields: ConfigFields) -> dict[str, Any]:
    """Kimi's linear_attn_config under transformers' names."""
    given = fields.values.get("linear_attn_config") or {}
    if not isinstance(given, dict):
        fields.refuse("linear_attn_config must be an object")
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim", "short_conv_kernel_size": "linear_conv_kernel_dim"}
    return {names.get(str(name), str(name)): value for name, value in given.items()}


def _read_mamba(fields: ConfigFields) -> Mamba2:
    heads, groups = fields.number("mamba_heads", least=1), fields.number("mamba_groups", 1, least=1)
    if fields.is_of("single_part"):
        dim = fields.number("mamba_head_dim", least=1)
        inner = heads * dim
    else:
        inner = fields.number("mamba_expand", 2, least=1) * fields.number("hidden_size", least=1)
        dim = inner // heads if fields.values.get("mamba_d_head") in (None, "auto") else fields.number("mamba_d_head", least=1)
    if heads * dim != inner or heads % groups:
        fields.refuse(f"{heads} Mamba heads of {dim} in {groups} groups do not make {inner} channels")
    state, kernel = fields.number("mamba_state", least=1), fields.number("mamba_kernel", 4, least=1)
    return Mamba2(heads, dim, groups, state, kernel, fields.number("mamba_chunk", 256, least=1))


def _read_mixture(fields: ConfigFields) -> Mixture | None:
    if not fields.has("experts") or fields.values.get("enable_moe_block") is False:
        return None
    for name in ("experts", "top_k"):
        said = {field: fields.values[field] for field in ALIASES[name] if fields.values.get(field)}
        if any(value != next(iter(said.values())) for value in list(said.values())[1:]):
            fields.refuse(f"{' and '.join(said)} contradict each other")
    experts, width = fields.number("experts", least=1), fields.number("expert_width", least=1)
    top_k, count = fields.number("top_k", least=1), fields.number("shared", int(fields.is_of("one_shared")))
    if top_k > experts:
        fields.refuse(f"{fields.named('top_k')} {top_k} is more than the {experts} experts of {fields.named('experts')}")
    if fields.has("enable_moe_block"):
        return Mixture(experts, top_k, width, fields.number("dense_width"))
    return Mixture(experts, top_k, width, fields.number("shared_width", count * width))


def _routed_layers(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: every `step`-th between dense ones at both ends, except listed ones; or each as named."""
    values = fields.values
    for name, test in (("mlp_layer_types", lambda kind: kind == "sparse"), ("moe_layer_freq", bool)):
        listed = values.get(name)
        if isinstance(listed, list) and listed:
            if unknown := sorted({kind for kind in listed if isinstance(kind, str)} - {"sparse", "dense"}):
                fields.refuse(f"{name} holds {', '.join(unknown)}: dense and sparse layers are modelled")
            if len(listed) != layers:
                fields.refuse(f"{name} lists {len(listed)} layers, num_hidden_layers says {layers}")
            return tuple(map(test, listed))
    first, every = fields.number("dense_first", 0), fields.number("moe_layer_freq", 1)
    last, step = fields.number("moe_layer_end_index", -1, least=-1), fields.number("sparse_step", 1) or 1
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        fields.refuse("mlp_only_layers must be a list of layers")
    routed = range(first, layers if last < 0 else min(last + 1, layers))
    return tuple(i in routed and i not in dense and i % max(every, 1) == 0 and (i + 1) % step == 0 for i in range(layers))


def _layer_windows(fields: ConfigFields, kinds: list[str]) -> tuple[int | None, ...]:
    """The windows of the layers with attention over cached tokens."""
    window = _window(fields)
    if not window:
        return (None,) * sum(kind in ATTENTION for kind in kinds)
    mixed = fields.values.get("layer_types") or "sliding_attention" in kinds
    limited = {"sliding_attention"} if mixed else {*ATTENTION}
    return tuple(window if kind in limited else None for kind in kinds if kind in ATTENTION)


def _layer_kinds(fields: ConfigFields, layers: int) -> list[str]:
    """The kind of each layer, from `layer_types` or, equivalently, the distance of layers of one kind."""
    kinds, interval = fields.values.get("layer_types"), fields.number("full_attention_interval", 0)
    if fields.is_of("channel_decay") and not kinds:
        full = _linear_config(fields).get("full_attn_layers")
        if not isinstance(full, list):
            fields.refuse("linear_attn_config names no full_attn_layers, and there are no layer_types")
        kinds = ["full_attention" if layer + 1 in full else "linear_attention" for layer in range(layers)]
    if fields.is_of("mamba2"):
        kinds = kinds or fields.values.get("layers_block_type") or ["mamba"] * layers
        kinds = [MAMBA_KINDS.get(kind, kind) for kind in kinds] if isinstance(kinds, list) else kinds
    if not kinds and interval:
        return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    if kinds is not None and (not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds)):
        fields.refuse("layer_types must be a list of names")
    if kinds and len(kinds) < layers:
        fields.refuse(f"layer_types lists {len(kinds)} layers, num_hidden_layers says {layers}")
    unknown = sorted(set(kinds or ()) - {*ATTENTION, "linear_attention"})
    if unknown:
        raise PredictError(
            f"{fields.path}: layer_types holds {', '.join(unknown)}: full, sliding and linear attention are modelled"
        )
    return list(kinds)[:layers] if kinds else _kinds_by_distance(fields, layers)


def _single_parts(fields: ConfigFields) -> list[str]:
    """The one part of each layer, by name or by letter."""
    listed = fields.values.get("layers_block_type") or fields.values.get("layer_types")
    given = listed or fields.values.get("hybrid_override_pattern") or ()
    kinds = (
        [MAMBA_KINDS.get(str(kind), PATTERN.get(str(kind), str(kind))) for kind in given] if isinstance(given, list | str) else []
    )
    if unknown := sorted({*kinds} - {*PATTERN.values()}) or not kinds:
        fields.refuse(f"layers_block_type holds {unknown or 'no list'}: {', '.join(PATTERN.values())} are modelled")
    return kinds


def _kinds_by_distance(fields: ConfigFields, layers: int) -> list[str]:
    """The kinds if not listed: full attention in every nth layer, or in all."""
    every = fields.number("full_every", FULL_EVERY.get(str(fields.values.get("model_type")), 0))
    if every:
        return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if _window(fields) and not fields.is_of("all_windowed"):
        fields.refuse("which layers have the sliding_window is not known of this model type: add layer_types")
    return ["full_attention"] * layers


def _window(fields: ConfigFields) -> int:
    """The attention window of layers that have one, 0 for none."""
    window = fields.number("sliding_window", 0) if fields.values.get("sliding_window") else 0
    return 0 if fields.values.get("use_sliding_window") is False else window


def _read_storage(fields: ConfigFields) -> Storage:
    """Bits per weight from `torch_dtype` and `quantization_config`."""
    values = fields.values
    said = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if said not in DTYPES:
        fields.refuse(f"torch_dtype {said!r} is not known: {', '.join(DTYPES)} are")
    dtype = DTYPES[said]
    plain = BITS[dtype]
    base = "fp32" if dtype == "fp32" else "fp16"
    quant = values.get("quantization_config")
    if not quant:
        return Storage(plain, plain, plain, base, dtype)
    if not isinstance(quant, dict):
        fields.refuse("quantization_config must be an object")
    method = str(quant.get("quant_method", ""))
    if method == "mxfp4":
        return Storage(plain, BITS["mxfp4"], plain, base, "mxfp4 experts")
    if method == "fp8":
        return Storage(8.0, 8.0, plain, "fp8", "fp8")
    bits, group = _quantized_bits(quant)
    if bits is None:
        raise PredictError(
            f"{fields.path}: quantization_config ({method or 'no quant_method'}) has no bits: "
            "add `bits`, or remove quantization_config and give --weights"
        )
    if not 1 <= bits <= 16:
        fields.refuse(f"quantization_config has {bits} bits: 1 to 16 are possible")
    stored = bits + (16 + bits) / group if group else float(bits)
    integer_products = bits == 8 and _activations_quantized(quant)
    return Storage(stored, stored, plain, "int8" if integer_products else base, f"{method} {bits} bit")


def _quantized_bits(quant: dict[str, Any]) -> tuple[int | None, int]:
    """(bits, group size, 0 for per channel) of GPTQ, AWQ, bitsandbytes, compressed-tensors."""
    weights = next((part for group in _quantized_groups(quant) if isinstance(part := group.get("weights"), dict)), {})
    loaded = 4 if quant.get("load_in_4bit") else 8 if quant.get("load_in_8bit") else None
    bits = quant.get("bits") or quant.get("w_bit") or weights.get("num_bits") or loaded
    group = quant.get("group_size") or weights.get("group_size") or (64 if loaded == 4 else 0)
    return (bits if _whole_number(bits) else None), max(group, 0) if _whole_number(group) else 0


def _whole_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _quantized_groups(quant: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of compressed-tensors."""
    groups = quant.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _activations_quantized(quant: dict[str, Any]) -> bool:
    return any(group.get("input_activations") for group in _quantized_groups(quant))
