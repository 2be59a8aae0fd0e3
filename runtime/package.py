"""A converted model: one folder of ONNX subgraphs with a manifest of their sizes and hashes.

    manifest.json   format, fingerprint of the checkpoint it came from, files by name: bytes, sha256
    config.json     the model's own
    tokenizer.json  the model's own, where it has one
    embed.onnx, head.onnx, attention_<layer>.onnx, router_<layer>.onnx, expert_<layer>_<expert>.onnx
    htp/            context binaries compiled for the NPU, made when first needed

A package is written into a temporary folder and renamed, so that no partial one stays.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from runtime.checkpoint import Checkpoint, read_config, read_json
from runtime.errors import PackageError
from runtime.models import Family, read_family

FORMAT = 1
MANIFEST = "manifest.json"
Progress = Callable[[int, int], None]


def fingerprint(folder: Path) -> str:
    """What a package of this model folder depends on: the config, and name, size and time of every weight file."""
    digest = hashlib.sha256(f"moescope package {FORMAT}\n".encode())
    for name in ("config.json", "tokenizer.json"):
        digest.update((folder / name).read_bytes() if (folder / name).exists() else b"")
    for path in sorted(folder.glob("*.safetensors*")):
        state = path.stat()
        digest.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def is_package(folder: Path) -> bool:
    """Does the folder look like a package?"""
    return (folder / MANIFEST).is_file()


class Package:
    """A package on disk, opened for reading."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = self._manifest()
        self.family: Family = read_family(read_config(folder), folder)
        for name, entry in self.manifest["files"].items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise PackageError(f"{path} is missing or has the wrong size: delete {folder} and convert again")

    def _manifest(self) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                told = f"{self.folder} has package format {manifest['format']}, this runtime reads {FORMAT}"
                raise PackageError(f"{told}: delete the folder and convert again")
            manifest["files"], manifest["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            told = f"{self.folder / MANIFEST} cannot be read ({error})"
            raise PackageError(f"{told}: delete the folder and convert again") from None
        return manifest

    def read(self, name: str) -> bytes:
        """A subgraph's ONNX bytes, read from disk now."""
        try:
            return (self.folder / f"{name}.onnx").read_bytes()
        except OSError as error:
            told = f"{self.folder / name}.onnx cannot be read ({error.strerror})"
            raise PackageError(f"{told}: delete the folder and convert again") from None

    def digest(self, name: str) -> str:
        """The subgraph's sha256, from the manifest."""
        return str(self.manifest["files"][f"{name}.onnx"]["sha256"])

    def damaged(self) -> list[str]:
        """Files whose content is not what was written."""
        return [
            name
            for name, entry in self.manifest["files"].items()
            if _sha256((self.folder / name).read_bytes()) != entry["sha256"]
        ]


def subgraphs(family: Family, checkpoint: Checkpoint) -> Iterator[tuple[str, Callable[[], onnx.ModelProto]]]:
    """Every subgraph's name and builder."""
    yield "embed", partial(family.embed, checkpoint)
    for layer in range(family.layers):
        yield attention_name(layer), partial(family.attention, checkpoint, layer)
        yield router_name(layer), partial(family.router, checkpoint, layer)
        for e in range(family.experts):
            yield expert_name(layer, e), partial(family.expert, checkpoint, layer, e)
    yield "head", partial(family.head, checkpoint)


def attention_name(layer: int) -> str:
    """Name of a layer's attention subgraph."""
    return f"attention_{layer:02d}"


def router_name(layer: int) -> str:
    """Name of a layer's router subgraph."""
    return f"router_{layer:02d}"


def expert_name(layer: int, expert: int) -> str:
    """Name of an expert's subgraph."""
    return f"expert_{layer:02d}_{expert:03d}"


def convert(model: Path, target: Path, progress: Progress | None = None) -> Package:
    """Convert a Hugging Face model folder into a package at `target`, replacing an older one."""
    family = read_family(read_config(model), model)
    checkpoint = Checkpoint(model)
    if target.exists() and not is_package(target) and not (target.is_dir() and not any(target.iterdir())):
        raise PackageError(f"{target} exists and is no package: choose another place with --package")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise PackageError(f"{target} cannot be written ({error.strerror}): choose another place with --package") from None
    try:
        _fill(partial, model, family, checkpoint, progress)
        shutil.rmtree(target, ignore_errors=True)
        partial.chmod(0o755)
        partial.rename(target)
    except OSError as error:
        told = f"{target} cannot be written ({error.strerror})"
        raise PackageError(f"{told}: free space or choose another place with --package") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Package(target)


def _fill(folder: Path, model: Path, family: Family, checkpoint: Checkpoint, progress: Progress | None) -> None:
    files: dict[str, dict[str, Any]] = {}

    def write(name: str, content: bytes) -> None:
        (folder / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": _sha256(content)}

    for name in ("config.json", "tokenizer.json"):
        if (model / name).exists():
            write(name, (model / name).read_bytes())
    parts = list(subgraphs(family, checkpoint))
    for done, (name, build) in enumerate(parts, 1):
        write(f"{name}.onnx", build().SerializeToString())
        if progress:
            progress(done, len(parts))
    model_type = read_config(model)["model_type"]
    manifest = {"format": FORMAT, "fingerprint": fingerprint(model), "model_type": model_type, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def user_cache() -> Path:
    """The user's cache folder of this program."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moescope"


def default_target(model: Path) -> Path:
    """`.moescope-package` in the model folder, or a place in the user's cache where that cannot be written."""
    if os.access(model, os.W_OK):
        return model / ".moescope-package"
    return user_cache() / hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:16]


def open_or_convert(path: Path, target: Path | None = None, progress: Progress | None = None) -> Package:
    """The package at `path`, or the up-to-date package of the model at `path`, converted if need be."""
    if is_package(path):
        return Package(path)
    read_config(path)
    target = target or default_target(path)
    if is_package(target):
        try:
            package = Package(target)
            if package.manifest["fingerprint"] == fingerprint(path):
                return package
        except PackageError:
            pass
    return convert(path, target, progress)


def read_tokenizer(folder: Path) -> Path:
    """Path of the tokenizer; a package without one can be inspected but not prompted."""
    path = folder / "tokenizer.json"
    read_json(path, "copy tokenizer.json into the model folder and convert again")
    return path
