"""Converts a Hugging Face model folder into a package, part by part, tensor by tensor.

A part is the embedding, the head, or one layer. Finished parts are noted in the working folder `.<package>.partial`, so that an
interrupted conversion resumes; only the finished package is renamed into place. If the model or the disk fails, nothing is left.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from runtime.errors import MoEError, PackageError, RequestError
from runtime.graphs.adapter import ADAPTER, TENSORS, Adapter
from runtime.graphs.builder import ExternalData, Store
from runtime.graphs.checkpoint import Checkpoint, read_config, read_json
from runtime.graphs.quantize import BITS, HALF_MAX, MeasuredPrecision, Precision
from runtime.models import Family, read_family
from runtime.models.decoder import Precisions
from runtime.package.coverage import check_coverage, with_its_head
from runtime.package.layout import (
    EXPERTS,
    FORMAT,
    MANIFEST,
    PAGE,
    Package,
    attention_name,
    default_target,
    file_entry,
    is_package,
    layer_name,
    sha256,
)
from runtime.package.tokens import further_end_ids, read_tokenizer

Progress = Callable[[int, int], None]
JOURNAL = "progress.json"
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
TEMPLATES = "additional_chat_templates"
ALIGNED = 64
ROWS_AT_ONCE = 8192
NPU_BLOCKS = (16, 32, 64, 128)
"""Number of weights that share a scale, as QNN supports it."""


@dataclass(frozen=True)
class PackageFormat:
    """The target of a conversion. backend cpu: fused operators; any, qnn: plain ones for the NPU too. bits: of expert weights.

    block, symmetric: of 4- and 8-bit weights. Attention, shared experts and dense layers take `attention_bits`, the head
    `head_bits` (0: as the experts); routers stay in float32, the embedding in 16 bits or more.
    """

    backend: str = "any"
    bits: int = 32
    block: int = 32
    symmetric: bool = True
    attention_bits: int = 0
    head_bits: int = 0

    def __post_init__(self) -> None:
        if self.backend not in ("any", "cpu", "qnn"):
            raise RequestError(f"backend {self.backend!r} is unknown: choose cpu or qnn")
        if self.backend == "qnn" and not self.portable:
            raise RequestError(
                f"the NPU does not support blocks of {self.block} weights: choose --block {NPU_BLOCKS[-1]} or less"
            )
        if any(bits not in (0, *BITS) for bits in (self.attention_bits, self.head_bits)):
            raise RequestError(f"bits are one of {BITS}")

    @property
    def portable(self) -> bool:
        """Whether to write subgraphs of plain operators."""
        return self.backend != "cpu" and (min(self.bits, self.attention_bits or 32) >= 16 or self.block in NPU_BLOCKS)

    def precisions(self, kind: Callable[..., Precision] = Precision) -> Precisions:
        """The precisions by the weights' use."""
        bits = (self.bits, self.attention_bits or self.bits, self.head_bits or self.bits)
        return Precisions(*(kind(each, self.block, self.symmetric) for each in bits))


class WeightFile:
    """Appends weights to a file and hashes it while writing."""

    def __init__(self, path: Path):
        self.path, self.size, self._digest = path, 0, hashlib.sha256()
        self._places: dict[str, ExternalData] = {}
        self._file = path.open("wb")

    def __enter__(self) -> "WeightFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        self._file.write(content)
        self._digest.update(content)
        self.size += len(content)

    def pad(self, multiple: int) -> None:
        """Append zeros up to the next multiple."""
        self.write(bytes(-self.size % multiple))

    def store(self, prefix: str) -> Store:
        """A store for a graph's weights; a second graph with the same prefix shares weights of equal names."""

        def place(name: str, value: np.ndarray) -> ExternalData:
            key = f"{prefix}/{name}"
            if key not in self._places:
                self.pad(ALIGNED)
                self._places[key] = ExternalData(self.path.name, self.size, value.nbytes)
                self.write(value.reshape(-1).view(np.uint8).data)
            return self._places[key]

        return place

    def entry(self) -> dict[str, Any]:
        """Size and hash for the manifest."""
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}


@dataclass
class PackagePart:
    """A part's entries for the manifest."""

    files: dict[str, Any] = field(default_factory=dict)
    subgraphs: dict[str, str] = field(default_factory=dict)
    embedding: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    rounding: dict[str, list[float]] = field(default_factory=dict)


class Conversion:
    """A running conversion: reads tensor by tensor, writes part by part."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        family: Family,
        target: PackageFormat,
        progress: Progress | None,
        adapter: Adapter | None = None,
    ):
        self.folder, self.model, self.target = folder, model, target
        self.checkpoint, self.progress = Checkpoint(model, adapter.merged if adapter else None), progress
        self.fingerprint = model_fingerprint(model, adapter.folder if adapter else None)
        on_grid = bool(self.checkpoint.quantization)
        self.precisions = target.precisions(partial(MeasuredPrecision, on_grid=on_grid))
        self.family = replace(family, precisions=self.precisions)
        self._key = sha256(f"{self.fingerprint} {target}".encode())
        self._done = 0

    def run(self) -> None:
        """Write the missing parts, then the manifest."""
        finished = self._journal()
        if not finished:
            shutil.rmtree(self.folder / TEMPLATES, ignore_errors=True)
            for stale in self.folder.iterdir():
                stale.unlink()
        for name, units, make in self._parts():
            if name not in finished:
                finished[name] = asdict(self._measured(make))
                journal = {"key": self._key, "parts": finished}
                partial = self.folder / (JOURNAL + ".new")
                partial.write_text(json.dumps(journal), encoding="utf-8")
                partial.replace(self.folder / JOURNAL)
            else:
                self._step(units)
        self._finish([PackagePart(**entries) for entries in finished.values()])

    def _measured(self, make: Callable[[], PackagePart]) -> PackagePart:
        """A part with its `rounding`: use of weights → squares of rounding errors and of weights."""
        sums = {use: precision.sums for use, precision in vars(self.precisions).items()}
        for both in sums.values():
            both[:] = 0
        part = make()
        part.rounding = {use: both.tolist() for use, both in sums.items()}
        return part

    def _parts(self) -> Iterator[tuple[str, int, Callable[[], PackagePart]]]:
        """(name, units of work, maker) of each part."""
        yield "embedding", 1, self._embedding
        yield "head", 1, self._head
        for layer in range(self.family.layers):
            experts = 0 if layer in self.family.dense else self.family.experts
            yield layer_name("layer", layer), 1 + experts, partial(self._layer, layer)

    def _journal(self) -> dict[str, Any]:
        """The parts finished by an interrupted conversion of the same model."""
        try:
            journal = json.loads((self.folder / JOURNAL).read_text(encoding="utf-8"))
            return dict(journal["parts"]) if journal["key"] == self._key else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _step(self, units: int = 1) -> None:
        self._done += units
        if self.progress:
            self.progress(self._done, sum(units for _, units, _ in self._parts()))

    def _embedding(self) -> PackagePart:
        family, dtype = self.family, self._embedding_type()
        with WeightFile(self.folder / "embedding.bin") as file:
            for rows in self._embedding_rows():
                file.write(np.ascontiguousarray(rows.astype(dtype)).reshape(-1).view(np.uint8).data)
        self._step()
        entry = {"file": "embedding.bin", "dtype": np.dtype(dtype).str, "shape": [family.vocabulary, family.hidden]}
        return PackagePart(files={"embedding.bin": file.entry()}, embedding=entry)

    def _embedding_type(self) -> type:
        """Half precision, unless the package is float32 or a value is too large for it."""
        if self.target.bits == 32:
            return np.float32
        return np.float16 if max(float(np.abs(rows).max()) for rows in self._embedding_rows()) < HALF_MAX else np.float32

    def _embedding_rows(self) -> Iterator[np.ndarray]:
        """The embedding table, ROWS_AT_ONCE at a time."""
        shape = (self.family.vocabulary, self.family.hidden)
        for first in range(0, self.family.vocabulary, ROWS_AT_ONCE):
            yield self.checkpoint.tensor("model.embed_tokens.weight", shape, slice(first, first + ROWS_AT_ONCE))

    def _head(self) -> PackagePart:
        part = PackagePart()
        with WeightFile(self.folder / "head.bin") as file:
            self._graph(part, "head", self.family.head(self.checkpoint, file.store("head")), file)
        part.files["head.bin"] = file.entry()
        self._step()
        return part

    def _layer(self, layer: int) -> PackagePart:
        part, family, checkpoint = PackagePart(), self.family, self.checkpoint
        with WeightFile(self.folder / f"{layer_name('layer', layer)}.bin") as file:
            attention = file.store("attention")
            self._graph(part, attention_name(layer), family.attention(checkpoint, layer, attention), file)
            if self.target.portable and family.PORTABLE:
                self._graph(part, attention_name(layer, True), family.portable_attention(checkpoint, layer, attention), file)
            for kind, make in family.subgraphs(layer).items():
                self._graph(part, layer_name(kind, layer), make(checkpoint, layer, file.store(kind)), file)
        part.files[file.path.name] = file.entry()
        self._step()
        if layer not in family.dense:
            self._experts(part, layer)
        return part

    def _experts(self, part: PackagePart, layer: int) -> None:
        """Write all experts of a layer in order; they differ only in their weights."""
        hashes: list[str] = []
        with WeightFile(self.folder / f"{layer_name(EXPERTS, layer)}.bin") as file:
            for expert in range(self.family.experts):
                store, content, layout = _expert_store()
                model = self.family.expert(self.checkpoint, layer, expert, store)
                hashes.append(sha256(content))
                file.write(content)
                file.pad(PAGE)
                self._step()
        self._graph(part, "expert", model, file)
        part.files[file.path.name] = file.entry()
        stride = file.size // self.family.experts
        by_layer = {str(layer): {"file": file.path.name, "sha256": hashes}}
        part.experts = {"tensors": layout, "bytes": len(content), "stride": stride, "layers": by_layer}

    def _graph(self, part: PackagePart, name: str, model: onnx.ModelProto, weights: WeightFile) -> None:
        content = model.SerializeToString()
        (self.folder / f"{name}.onnx").write_bytes(content)
        part.files[f"{name}.onnx"] = file_entry(content)
        # Experts' weights have separate digests.
        used = "" if name == "expert" else weights.entry()["sha256"]
        part.subgraphs[name] = sha256(f"{part.files[f'{name}.onnx']['sha256']} {used}".encode())

    def _finish(self, parts: list[PackagePart]) -> None:
        files: dict[str, Any] = {}
        for name in copied_files(self.model):
            content = (self.model / name).read_bytes()
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(content)
            files[name] = file_entry(content)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "model_type": read_config(self.model)["model_type"],
            "target": asdict(self.target),
            "precisions": asdict(self.target.precisions()),
            "files": files,
            "subgraphs": {},
            "embedding": {},
            "rounding": _relative_errors(parts),
            "experts": {"tensors": [], "bytes": 0, "stride": 0, "layers": {}},
        }
        for part in parts:
            for key in ("files", "subgraphs", "embedding"):
                manifest[key] |= getattr(part, key)
            layers = manifest["experts"]["layers"] | part.experts.get("layers", {})
            manifest["experts"] |= part.experts | {"layers": layers}
        (self.folder / JOURNAL).unlink(missing_ok=True)
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _relative_errors(parts: list[PackagePart]) -> dict[str, float]:
    """Use of weights → size of what rounding changed in them, relative to theirs (root mean squares)."""
    uses = sorted({use for part in parts for use in part.rounding})
    sums = {use: np.sum([part.rounding[use] for part in parts], axis=0) for use in uses}
    return {use: float(np.sqrt(errors / weights)) for use, (errors, weights) in sums.items() if weights}


def _expert_store() -> tuple[Store, bytearray, list[dict[str, Any]]]:
    """(store for one expert's weights, the bytes that it fills, the tensors' places in them)."""
    content, layout = bytearray(), []

    def place(name: str, value: np.ndarray) -> ExternalData:
        content.extend(bytes(-len(content) % ALIGNED))
        external = ExternalData(EXPERTS, len(content), value.nbytes)
        entry = {"name": name, "dtype": value.dtype.str, "shape": list(value.shape)}
        layout.append(entry | {"offset": external.offset, "bytes": external.size})
        content.extend(value.reshape(-1).view(np.uint8).data)
        return external

    return place, content, layout


def copied_files(model: Path) -> list[str]:
    """The files that a package takes over from a model folder, relative to it."""
    templates = sorted(str(path.relative_to(model)) for path in model.glob(f"{TEMPLATES}/*.jinja"))
    return [name for name in COPIED if (model / name).exists()] + templates


def model_fingerprint(folder: Path, adapter: Path | None = None) -> str:
    """A hash of what a package of this model folder depends on: the config, and name, size and time of every weight file."""
    digest = hashlib.sha256(f"moescope package {FORMAT}\n".encode())
    for name in copied_files(folder):
        digest.update((folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors*")):
        state = path.stat()
        digest.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    for path in (adapter / ADAPTER, adapter / TENSORS) if adapter else ():
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


def convert(
    model: Path,
    target: Path,
    progress: Progress | None = None,
    what: PackageFormat | None = None,
    adapter_folder: Path | None = None,
) -> Package:
    """Convert a Hugging Face model folder into a package at `target`, replacing an older one; a LoRA adapter is merged."""
    config = read_config(model)
    family = read_family(config, model)
    read_tokenizer(model)
    further_end_ids(model, family.vocabulary)
    if (settings := model / "tokenizer_config.json").exists():
        read_json(settings, "copy it from the model")
    if target.exists() and not is_package(target) and not (target.is_dir() and not any(target.iterdir())):
        raise PackageError(f"{target} exists and is not a package: choose another folder")
    if (model / ADAPTER).exists() and adapter_folder is None:
        problem = f"{model} has an adapter ({ADAPTER}) beside the model, which would be left out"
        raise PackageError(f"{problem}: give its folder as --adapter, or move its files away")
    what = what or PackageFormat()
    if what.backend == "qnn" and not family.PORTABLE:
        problem = f"there are no NPU subgraphs for {config['model_type']}"
        raise RequestError(f"{problem}: convert it with --backend cpu")
    family = with_its_head(model, family)
    adapter = Adapter(adapter_folder) if adapter_folder else None
    check_coverage(model, family, config, adapter)
    working = target.parent / f".{target.name}.partial"
    try:
        working.mkdir(parents=True, exist_ok=True)
        with _conversion_lock(working):
            Conversion(working, model, family, what, progress, adapter).run()
            shutil.rmtree(target, ignore_errors=True)
            working.rename(target)
    except BlockingIOError:
        raise PackageError(f"{target} is being written by another conversion: wait until it ends") from None
    except OSError as error:
        shutil.rmtree(working, ignore_errors=True)
        problem = f"{target} cannot be written ({error.strerror or error})"
        raise PackageError(f"{problem}: free space or choose another folder") from None
    except MoEError:
        shutil.rmtree(working, ignore_errors=True)
        raise
    package = Package(target, verify=False)
    package.remember_verified()  # its hashes were computed while it was written
    return package


@contextmanager
def _conversion_lock(folder: Path) -> Iterator[None]:
    """Lock the folder against a second conversion; the kernel unlocks it however this process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def up_to_date(model: Path, target: Path, what: PackageFormat | None = None, adapter: Path | None = None) -> Package | None:
    """The package at `target` if it is complete and was made from this model, in this format if given; otherwise None."""
    if not is_package(target):
        return None
    try:
        package = Package(target)
    except MoEError:
        return None
    same = package.manifest["fingerprint"] == model_fingerprint(model, adapter)
    return package if same and (what is None or package.manifest.get("target") == asdict(what)) else None


def open_or_convert(path: Path, target: Path | None = None, progress: Progress | None = None) -> Package:
    """The package at `path`, or the up-to-date package of the model at `path`, converted if needed."""
    if is_package(path):
        return Package(path)
    read_config(path)
    target = target or default_target(path)
    return up_to_date(path, target) or convert(path, target, progress)
