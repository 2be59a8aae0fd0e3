"""Matrices of published quantised checkpoints as plain floats: fp8 blocks, compressed-tensors, GPTQ and AWQ.

Their layouts are public: safetensors' header, compressed-tensors' `weight_packed`, GPTQ's `qweight` and `g_idx`, AWQ's order of
eight columns. A matrix [N, K] that lies in several tensors looks like one tensor of floats, which is read by rows.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from runtime.errors import ModelError

Read = Callable[[str], Any]
"""Name of a stored tensor → the unread tensor."""
Part = int | slice
FLOAT8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
"""Types of safetensors that its NumPy reader does not know."""
CODES = ("I8", "F8_E4M3", "F8_E5M2")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
"""Formats of compressed-tensors that are read."""
WORD, WIDTHS = 32, (2, 4, 8)
"""Bits of a word, and of a code."""
SCALES = (".weight_scale_inv", "_proj_scale_inv", ".weight_scale")
PARTS = {
    "fp8": (*SCALES, ".activation_scale", ".input_scale"),
    "compressed-tensors": (
        *(f".{part}" for part in ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")),
        *(f".{part}" for part in ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale")),
    ),
    "gptq": (".qweight", ".qzeros", ".scales", ".g_idx"),
    "awq": (".qweight", ".qzeros", ".scales"),
    "mxfp4": (),
}
"""Method of quantization_config → ends of names of tensors that are a part of a matrix, or only of use to activations."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the eight columns of a word lie in it."""


@lru_cache(maxsize=4)
def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(entries of a safetensors file, where its data begin)."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


class Float8:
    """A stored tensor of 8-bit floats, read from the file itself."""

    def __init__(self, path: Path, name: str, dtype: str):
        header, start = _read_header(path)
        self.dtype, self.shape = dtype, header[name]["shape"]
        start += header[name]["data_offsets"][0]
        self.values = np.memmap(path, np.uint8, "r", start, tuple(self.shape)).view(FLOAT8[dtype])

    def get_dtype(self) -> str:
        """The type's name in safetensors."""
        return self.dtype

    def get_shape(self) -> list[int]:
        """The shape."""
        return list(self.shape)

    def __getitem__(self, part: Part) -> np.ndarray:
        """A part along the first axis."""
        return np.asarray(self.values[part])


class Matrix(ABC):
    """A matrix, or one per expert, of floats that several stored tensors describe; it is read as safetensors' slices are."""

    def __init__(self, name: str, read: Read, names: Iterable[str], settings: dict[str, Any]):
        self.name, self.read, self.names, self.settings = name, read, names, settings

    def get_dtype(self) -> str:
        """Floats of 32 bits."""
        return "F32"

    @abstractmethod
    def get_shape(self) -> list[int]:
        """The matrix's own shape."""

    @abstractmethod
    def __getitem__(self, part: Part) -> np.ndarray:
        """Rows, or one expert's matrix, in float32."""

    def stem(self, part: str) -> str:
        """The name of another tensor of the same module."""
        return self.name.removesuffix("weight") + part

    def stored(self, part: str) -> Any:
        """Another tensor of the same module, unread."""
        if self.stem(part) not in self.names:
            raise ModelError(f"tensor {self.stem(part)} is missing, without which {self.name} is not known: copy it again")
        return self.read(self.stem(part))

    def whole(self, part: str) -> np.ndarray:
        """Another tensor of the same module."""
        value: np.ndarray = self.stored(part)[:]
        return value

    def block(self, size: int, count: int, given: int) -> int:
        """Numbers of an axis that share a scale: as given, else all, or a power of two, as a smaller last part cannot be seen."""
        if given > 0 and -(-size // given) == count:
            return given
        each = size // max(count, 1)
        if each * count != size or (count > 1 and each & (each - 1)):
            raise self.refuse(f"{count} scales do not divide its axis of {size} into equal powers of two")
        return each

    def refuse(self, problem: str) -> ModelError:
        """The error for a layout that does not fit the tensors."""
        return ModelError(f"tensor {self.name} cannot be read: {problem}: convert the unquantised checkpoint")


class Scaled(Matrix):
    """8-bit floats or integers [.., N, K] with scales for blocks, rows or the whole: [.., n, k], [n] or one number."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        ends = [f"{self.name}_scale_inv", f"{self.name}_scale"]
        self.scale_name = next(name for name in ends if name in self.names)
        if self.name not in self.names:
            raise self.refuse(f"{self.scale_name} has no values beside it")
        self.codes = self.read(self.name)
        if self.codes.get_dtype() not in CODES:
            raise self.refuse(f"it is stored as {self.codes.get_dtype()} and has scales")

    def get_shape(self) -> list[int]:
        """The codes' shape."""
        return list(self.codes.get_shape())

    def __getitem__(self, part: Part) -> np.ndarray:
        """Codes, less a zero point, times scale."""
        values = np.asarray(self.codes[part]).astype(np.float32)
        zeros = f"{self.name}_zero_point"
        if zeros in self.names:
            values -= self._over_rows(self._grid(self.read(zeros)[:]), part)
        values *= self._over_rows(self.scales, part)
        return values

    @cached_property
    def scales(self) -> np.ndarray:
        """[.., n, k]."""
        return self._grid(self.read(self.scale_name)[:])

    def _grid(self, stored: np.ndarray) -> np.ndarray:
        if stored.dtype == np.uint8:  # exponents of two
            stored = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
        shape = self.get_shape()
        leading = shape[:-2]
        grid = stored.astype(np.float32)
        if grid.ndim != len(shape):
            grid = grid.reshape(*leading, -1, 1)
        if list(grid.shape[:-2]) != leading:
            raise self.refuse(f"scales {list(stored.shape)} do not fit its shape {shape}")
        return grid

    def _over_rows(self, grid: np.ndarray, part: Part) -> np.ndarray:
        """The grid's numbers, one for each of the part's codes."""
        rows, columns = self.get_shape()[-2:]
        given = self.settings.get("weight_block_size") or (0, 0)
        tall, wide = self.block(rows, grid.shape[-2], given[0]), self.block(columns, grid.shape[-1], given[1])
        if len(self.get_shape()) == 2:
            grid = grid[np.arange(rows)[part] // tall]
        else:
            grid = np.repeat(grid[part], tall, axis=-2)[..., :rows, :]
        return grid if wide == columns else np.repeat(grid, wide, axis=-1)[..., :columns]


class Grouped(Matrix):
    """Whole-number codes [N, K] of which groups along K share a scale and a zero point, or scattered columns do (`groups`)."""

    @abstractmethod
    def codes(self, part: Part) -> np.ndarray:
        """Codes [rows, K] from 0."""

    @abstractmethod
    def zeros(self, part: Part) -> np.ndarray | int:
        """The codes of zero [rows, G]."""

    @abstractmethod
    def scales(self, part: Part) -> np.ndarray:
        """[rows, G]."""

    def __getitem__(self, part: Part) -> np.ndarray:
        """(code - zero) * scale."""
        values, scales, zeros = self.codes(part).astype(np.float32), self.scales(part), self.zeros(part)
        groups = self._groups(scales.shape[-1])
        values -= zeros if isinstance(zeros, int) else zeros.astype(np.float32)[:, groups]
        values *= scales.astype(np.float32)[:, groups]
        return values

    def _groups(self, count: int) -> np.ndarray:
        """The group [K] of each column."""
        columns = self.get_shape()[1]
        if stored := next((name for name in map(self.stem, ("g_idx", "weight_g_idx")) if name in self.names), ""):
            groups: np.ndarray = self.read(stored)[:]
            if groups.shape != (columns,) or groups.min() < 0 or groups.max() >= count:
                raise self.refuse(f"{stored} does not name a group below {count} for each of {columns} columns")
            return groups
        if self.settings.get("desc_act") or "'actorder': 'group'" in str(self.settings.get("config_groups")):
            raise self.refuse("it has no g_idx, which config.json demands")
        return np.arange(columns) // self.block(columns, count, self.settings.get("group_size") or 0)


class Packed(Grouped):
    """compressed-tensors: words along K, codes around the middle, scales [N, G]; zero points are packed along N."""

    def get_shape(self) -> list[int]:
        """As stored beside the words."""
        return [int(size) for size in self.whole("weight_shape")]

    @cached_property
    def bits(self) -> int:
        """Bits of a code, by the words' number."""
        words, columns = self.stored("weight_packed").get_shape()[1], self.get_shape()[1]
        if found := [bits for bits in WIDTHS if -(-columns * bits // WORD) == words]:
            return found[0]
        raise self.refuse(f"{words} words do not hold {columns} columns of {' or '.join(map(str, WIDTHS))} bits")

    def codes(self, part: Part) -> np.ndarray:
        """Codes [rows, K]."""
        return unpacked(self.stored("weight_packed")[part], self.bits)[:, : self.get_shape()[1]]

    def zeros(self, part: Part) -> np.ndarray | int:
        """Stored zero points, else the middle."""
        if self.stem("weight_zero_point") not in self.names:
            return 1 << (self.bits - 1)
        return unpacked(self.whole("weight_zero_point").T, self.bits).T[: self.get_shape()[0]][part]

    def scales(self, part: Part) -> np.ndarray:
        """[rows, G]."""
        stored = self.whole("weight_scale")
        return np.broadcast_to(stored.reshape(len(stored), -1), (self.get_shape()[0], stored.size // len(stored)))[part]


class Gptq(Grouped):
    """GPTQ: words along K of the transposed matrix [K, N], scales [G, N], zero points in words along N, less 1 in format 1."""

    @cached_property
    def bits(self) -> int:
        """Bits of a code, by the words of a row of zero points."""
        words, columns = self.stored("qzeros").get_shape()[1], self.stored("scales").get_shape()[1]
        if (bits := words * WORD // columns) not in WIDTHS or self.stored("qweight").get_dtype() != "I32":
            raise self.refuse(f"codes of {bits} bits are not read")
        return bits

    def get_shape(self) -> list[int]:
        """By the words and the scales."""
        return [self.stored("scales").get_shape()[1], self._stored_shape()[0] * WORD // self.bits]

    def _stored_shape(self) -> list[int]:
        return list(self.stored("qweight").get_shape())

    def codes(self, part: Part) -> np.ndarray:
        """Codes [rows, K]."""
        return unpacked(self.stored("qweight")[:, part].T, self.bits)

    def zeros(self, part: Part) -> np.ndarray | int:
        """Stored zero points."""
        words = self.whole("qzeros").view(np.uint32)
        if self.settings.get("checkpoint_format", "gptq") == "gptq":
            words = words + np.uint32(sum(1 << shift for shift in range(0, WORD, self.bits)))
        return unpacked(words, self.bits)[:, part].T

    def scales(self, part: Part) -> np.ndarray:
        """[rows, G]."""
        return np.asarray(self.whole("scales")[:, part].T)


class Awq(Gptq):
    """AWQ: words along N of the transposed matrix [K, N], eight columns in their own order, zero points as they are."""

    def get_shape(self) -> list[int]:
        """By the words."""
        rows, words = self._stored_shape()
        return [words * WORD // self.bits, rows]

    def codes(self, part: Part) -> np.ndarray:
        """Codes [rows, K]."""
        return self._columns(self.stored("qweight")[:])[:, part].T

    def zeros(self, part: Part) -> np.ndarray | int:
        """Stored zero points."""
        return self._columns(self.whole("qzeros"))[:, part].T

    def _columns(self, words: np.ndarray) -> np.ndarray:
        if self.bits != 4:
            raise self.refuse(f"codes of {self.bits} bits are not read")
        return unpacked(words, 4).reshape(len(words), -1, 8)[..., AWQ_ORDER].reshape(len(words), -1)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes [.., W * 32 / bits] from 32-bit words [.., W], low bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8)[..., None]
    codes = (octets >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1)


def quantization_of(config: dict[str, Any]) -> dict[str, Any]:
    """config.json's settings of a quantised checkpoint, empty for plain floats; raises ModelError for what is not read."""
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    if not settings:
        return {}
    method = str(settings.get("quant_method"))
    variant, known = {
        "compressed-tensors": (settings.get("format"), FORMATS),
        "gptq": (settings.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2")),
        "awq": (str(settings.get("version") or settings.get("format") or "gemm").lower(), ("gemm",)),
    }.get(method, (method, tuple(PARTS)))
    turned = settings.get("transform_config") or settings.get("sparsity_config")
    if variant not in known or turned:
        what = method if variant == method else f"{method} in format {variant}" if not turned else f"{method} with transforms"
        problem = f"the checkpoint is quantised by {what}, which this runtime does not read"
        raise ModelError(f"{problem}: take the unquantised checkpoint, and give --bits to `moescope convert`")
    return settings | _block_sizes(settings)


def _block_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """The sizes of blocks and groups, which compressed-tensors gives for groups of matrices."""
    groups = settings.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    sizes = {"weight_block_size": settings.get("weight_block_size"), "group_size": settings.get("group_size")}
    for name, theirs in (("weight_block_size", "block_structure"), ("group_size", "group_size")):
        said = [part.get(theirs) for part in weights]
        sizes[name] = said[0] if said and said.count(said[0]) == len(said) else sizes[name]
    blocks, group = sizes.values()
    whole = isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int for size in blocks)
    if not (blocks is None or whole) or not (group is None or type(group) is int):
        raise ModelError(f"quantization_config has blocks {blocks!r} and groups {group!r}, expected are whole numbers")
    return sizes


def kinds_of(settings: dict[str, Any], names: Iterable[str]) -> dict[str, type[Matrix] | None]:
    """Name of each matrix that several of these stored tensors describe → its layout; names of mere parts → None."""
    method = settings.get("quant_method")
    ends = PARTS.get(str(method), ())
    found: dict[str, type[Matrix] | None] = {name: None for name in names if ends and name.endswith(ends)}
    whole: dict[str, type[Matrix] | None] = {}
    for name in found:
        if name.endswith(".qweight"):
            whole[name.removesuffix("qweight") + "weight"] = Awq if method == "awq" else Gptq
        elif name.endswith(".weight_packed"):
            whole[name.removesuffix("_packed")] = Packed
        elif name.endswith(SCALES):
            plain = name.removesuffix("_inv").removesuffix("_scale")
            whole |= {} if f"{plain}_packed" in names else {plain: Scaled}
    if ends and not whole:
        raise ModelError(f"config.json says that the checkpoint is quantised by {method}, but its tensors are not: copy it again")
    return found | whole
