"""A converted model: a folder of ONNX subgraphs and large weight files, with a manifest of their contents.

    manifest.json         format, fingerprint of the checkpoint, precisions, files (bytes, sha256), subgraphs (digests),
                          embedding; experts: tensors of one expert (name, dtype, shape, offset), bytes, stride, and for each
                          layer the file and the hashes
    config.json           the model's own; tokenizer.json, generation_config.json, chat_template.jinja and the like too
    <name>.onnx           subgraphs, their weights outside: head, attention_<layer>, router_<layer>,
                          shared_<layer>, mlp_<layer>; attention_<layer>.portable in plain operators, for NPUs
    expert.onnx           the subgraph of every expert; its weights are named, and come from the experts' file
    embedding.bin         the embedding table, row by row
    head.bin, layer_<layer>.bin    weights of those subgraphs, each at a multiple of 64 bytes
    experts_<layer>.bin   all experts of a layer, each one contiguous and at a multiple of 4096 bytes: one aligned read brings it
    htp/                  context binaries compiled for the NPU, made when first needed

Written by runtime.convert.
"""

import hashlib
import json
import mmap
import os
from contextlib import suppress
from errno import EINVAL
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import external_data_helper

from runtime.errors import PackageError
from runtime.graphs.checkpoint import read_config
from runtime.models import Family, read_family
from runtime.package.huge_pages import populate
from runtime.package.reader import ALIGNMENT, FileRange

FORMAT = 3
MANIFEST = "manifest.json"
VERIFIED = ".verified"
PAGE = ALIGNMENT
EXPERTS = "experts"


def is_package(folder: Path) -> bool:
    """Whether the folder looks like a package."""
    return (folder / MANIFEST).is_file()


class Package:
    """A package opened for reading. Files that changed since the last check are verified against their hashes."""

    def __init__(self, folder: Path, verify: bool = True):
        self.folder = folder
        self.manifest = self._manifest()
        config = read_config(folder)
        model_type = config.get("model_type")
        if self.manifest.get("model_type", model_type) != model_type:
            problem = f"{folder} was converted from a {self.manifest['model_type']}, config.json says {model_type!r}"
            raise PackageError(f"{problem}: delete the folder and convert again")
        self.family: Family = read_family(config, folder)
        self._maps: dict[Path, mmap.mmap] = {}
        self._resident: set[Path] = set()
        self._huge_pages = True  # until a file has none
        for name, entry in self.manifest["files"].items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise PackageError(f"{path} is missing or has the wrong size: delete {folder} and convert again")
        if verify:
            self._verify()

    def _manifest(self) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                problem = f"{self.folder} has package format {manifest['format']}, this runtime reads {FORMAT}"
                raise PackageError(f"{problem}: delete the folder and convert again")
            for key in ("files", "fingerprint", "subgraphs", "experts", "embedding", "precisions"):
                manifest[key]
            sums = [entry["sha256"] for entry in manifest["files"].values()]
            numbers = [manifest["experts"][name] for name in ("bytes", "stride")] + [manifest["precisions"]["experts"]["bits"]]
            if not all(isinstance(n, int) for n in (*numbers, *(entry["bytes"] for entry in manifest["files"].values()))):
                raise TypeError("bytes and bits must be numbers")
            if not all(isinstance(text, str) for text in (*manifest["subgraphs"].values(), *sums)):
                raise TypeError("digests must be text")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{self.folder / MANIFEST} cannot be read ({error})"
            raise PackageError(f"{problem}: delete the folder and convert again") from None
        return manifest

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights as stored."""
        return int(self.manifest["experts"]["bytes"])

    @property
    def all_experts_bytes(self) -> int:
        """Bytes of all experts of all layers as stored."""
        return self.expert_bytes * self.family.experts * len(self.family.routed)

    @property
    def portable(self) -> bool:
        """Whether it has the subgraphs of plain operators for NPUs."""
        return attention_name(0, portable=True) in self.manifest["subgraphs"]

    @property
    def compiled_for(self) -> dict[str, Any]:
        """Options (tiers, chunk, soc) for which context binaries were compiled in advance; empty if none were."""
        compiled = self.manifest.get("compiled", {})
        options = {name: compiled[name] for name in ("chunk", "soc") if compiled.get(name)}
        return options | ({"tiers": tuple(compiled["tiers"])} if compiled.get("tiers") else {})

    @cached_property
    def half_experts(self) -> bool:
        """Whether experts are stored in float16."""
        return bool(self.manifest["precisions"]["experts"]["bits"] == 16)

    @cached_property
    def expert_stride(self) -> int:
        """Bytes from one expert to the next, a multiple of PAGE."""
        return int(self.manifest["experts"]["stride"])

    def expert_range(self, layer: int, expert: int) -> FileRange:
        """The range of the expert's weights, which begins at a multiple of PAGE."""
        return FileRange(self._expert_files[layer], expert * self.expert_stride, self.expert_bytes)

    @cached_property
    def _expert_files(self) -> dict[int, Path]:
        return {int(layer): self.folder / entry["file"] for layer, entry in self.manifest["experts"]["layers"].items()}

    def expert_weights(self, memory: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of an expert by name, as views of its bytes (uint8)."""
        return {name: memory[part].view(dtype).reshape(shape) for name, part, dtype, shape in self._expert_layout}

    @cached_property
    def _expert_layout(self) -> list[tuple[str, slice, np.dtype[Any], tuple[int, ...]]]:
        return [
            (t["name"], slice(t["offset"], t["offset"] + t["bytes"]), np.dtype(t["dtype"]), tuple(t["shape"]))
            for t in self.manifest["experts"]["tensors"]
        ]

    def mapped_expert(self, layer: int, expert: int) -> np.ndarray:
        """The expert's bytes in the mapped file: pages are read when touched."""
        span = self.expert_range(layer, expert)
        return np.frombuffer(self._map(span.path), np.uint8, span.bytes, span.offset)

    def resident(self, path: Path) -> mmap.mmap:
        """A mapped file, all of it read; in huge pages if kernel and file system support them."""
        whole = self._map(path)
        if path not in self._resident:
            try:
                self._huge_pages = populate(whole, path, self._huge_pages)
            except OSError as error:
                if error.errno != EINVAL:  # not supported by kernels before 5.14
                    raise PackageError(f"{path} cannot be read ({error.strerror}): convert again") from None
            self._resident.add(path)
        return whole

    def embedding(self) -> np.ndarray:
        """The embedding table [V, H], mapped. A row is read alone: read-ahead would displace weights where memory is scarce."""
        entry = self.manifest["embedding"]
        whole = self._map(self.folder / entry["file"])
        whole.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(whole, entry["dtype"]).reshape(entry["shape"])

    def graph(self, name: str) -> bytes:
        """A subgraph's ONNX bytes without its weights."""
        try:
            return (self.folder / f"{name}.onnx").read_bytes()
        except OSError as error:
            problem = f"{self.folder / name}.onnx cannot be read ({error.strerror})"
            raise PackageError(f"{problem}: delete the folder and convert again") from None

    def whole_graph(self, name: str) -> bytes:
        """A subgraph's ONNX bytes with all weights inside; `name` may be an expert's."""
        place = parse_expert_name(name)
        model = onnx.load_model_from_string(self.graph("expert" if place else name))
        if not place:
            external_data_helper.load_external_data_for_model(model, str(self.folder))
            return bytes(model.SerializeToString())
        weights = self.expert_weights(self.mapped_expert(*place))
        for tensor in model.graph.initializer:
            if tensor.name in weights:
                tensor.CopyFrom(onnx.numpy_helper.from_array(weights[tensor.name], tensor.name))
        return bytes(model.SerializeToString())

    def digest(self, name: str) -> str:
        """The sha256 of everything that the subgraph depends on, weights included."""
        place = parse_expert_name(name)
        if not place:
            return str(self.manifest["subgraphs"][name])
        weights = self.manifest["experts"]["layers"][str(place[0])]["sha256"][place[1]]
        return sha256(f"{self.manifest['subgraphs']['expert']} {weights}".encode())

    def damaged(self) -> list[str]:
        """Files whose content differs from what was written."""
        return [name for name, entry in self.manifest["files"].items() if file_sha256(self.folder / name) != entry["sha256"]]

    def stamps(self) -> dict[str, list[int]]:
        """Size and time of every file; equal stamps need no second check."""
        states = {name: (self.folder / name).stat() for name in self.manifest["files"]}
        return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}

    def write(self, name: str, content: bytes, remedy: str = "free space or copy the package") -> Path:
        """Write a file into the package atomically, replacing an older one; an error ends with `remedy`."""
        path, partial = self.folder / name, self.folder / f".{name}.partial"
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        except OSError as error:
            raise PackageError(f"{self.folder} cannot be written ({error.strerror}): {remedy}") from None
        finally:
            partial.unlink(missing_ok=True)
        return path

    def require_writable(self) -> None:
        """Refuse a read-only package before long work whose result is to be stored in it."""
        if not os.access(self.folder, os.W_OK):
            raise PackageError(f"{self.folder} cannot be written: work on a copy of the package")

    def change_manifest(self, changes: dict[str, Any], remedy: str = "free space or copy the package") -> None:
        """Replace entries of the manifest, on disk and in memory."""
        manifest = self.manifest | changes
        self.write(MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode(), remedy)
        self.manifest = manifest

    def remember_verified(self) -> None:
        """Note that the files match their hashes."""
        with suppress(OSError):
            (self.folder / VERIFIED).write_text(json.dumps(self.stamps()), encoding="utf-8")

    def _verify(self) -> None:
        with suppress(OSError, ValueError):
            if json.loads((self.folder / VERIFIED).read_text(encoding="utf-8")) == self.stamps():
                return
        if names := self.damaged():
            raise PackageError(f"{self.folder / names[0]} is damaged (its hash differs): delete {self.folder} and convert again")
        self.remember_verified()

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            except (OSError, ValueError) as error:
                raise PackageError(f"{path} cannot be read ({error}): delete {self.folder} and convert again") from None
        return self._maps[path]


def layer_name(kind: str, layer: int) -> str:
    """Name of a layer's subgraph: attention, router, shared, mlp, norm."""
    return f"{kind}_{layer:02d}"


def attention_name(layer: int, portable: bool = False) -> str:
    """Name of a layer's attention subgraph."""
    return layer_name("attention", layer) + (".portable" if portable else "")


def expert_name(layer: int, expert: int) -> str:
    """Name of an expert's subgraph."""
    return f"expert_{layer:02d}_{expert:03d}"


def parse_expert_name(name: str) -> tuple[int, int] | None:
    """(layer, expert) of an expert's subgraph; None for others."""
    parts = name.split("_")
    return (int(parts[1]), int(parts[2])) if parts[0] == "expert" and len(parts) == 3 else None


def sha256(content: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(content).hexdigest()


def file_entry(content: bytes) -> dict[str, Any]:
    """Size and hash of a file for the manifest."""
    return {"bytes": len(content), "sha256": sha256(content)}


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def user_cache() -> Path:
    """The user's cache folder of this program."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moescope"


def default_target(model: Path) -> Path:
    """`.moescope-package` in the model folder, or a place in the user's cache if that is not writable."""
    if os.access(model, os.W_OK):
        return model / ".moescope-package"
    return user_cache() / sha256(str(model.resolve()).encode())[:16]
