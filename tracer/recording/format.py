"""The recording on disk: a folder with `manifest.json` and two files of fixed-size slots; readable after any crash.

    manifest.json   what was traced, on what, with which probes, and what was lost (keys: analyzer/records/manifest.toml)
    events.bin      64-byte slots as in the ring: 8 bytes of ring header, then a record of bpf/records.h
    details.bin     256-byte slots, likewise

    *.sum           checksums of both (tracer/recording/checksums.py); the manifest contains its own

Slots are only ever appended, so whatever reached the disk before a crash is a valid recording.
"""

import json
import mmap  # noqa: F401 (NumPy imports it later, perhaps with the rights of a user who cannot read Python's folder)
import os
from pathlib import Path
from typing import Any

import numpy as np

from moescope.answers import note_emulator
from moescope.errors import UserError
from moescope.plain import doubts
from tracer.recording.checksums import digest, sums_of

SCHEMA_VERSION = 1
RING_HEADER_BYTES = 8
BUSY, DISCARD = 1 << 31, 1 << 30
STREAMS = {"events": 64, "details": 256}
FIRST_DETAIL = 64
KIND_OFFSET = RING_HEADER_BYTES + 16
SHAPE = {
    dict: "machine heat power steady model options step_latency sampling io engines qnn target records lost dropped cost layouts",
    list: "clocks threads probes functions level_changes disturbances qnn_logs models",
}
"""The manifest's parts that are objects, and those that are lists of objects."""


SEAL = b'"checksum": "'
"""What stands in a sealed file before the digits of its checksum, which end it."""
SEAL_BYTES = len('0123456789abcdef"}\n')


class RecordingError(UserError):
    """A recording cannot be written or read; the message names the file and the remedy."""


def dtype_to_json(dtype: np.dtype) -> list[list[Any]]:
    """Rows [name, format, offset, length]; nested structs are flattened with their members' own names."""
    rows: list[list[Any]] = []
    for name, (field, offset, *_) in (dtype.fields or {}).items():
        if field.names:
            rows += [[inner, kind, offset + at, n] for inner, kind, at, n in dtype_to_json(field)]
        elif field.subdtype:
            rows.append([name, field.subdtype[0].str, offset, field.subdtype[1][0]])
        else:
            rows.append([name, field.str, offset, 0])
    return [row for row in rows if row[0] != "pad"]


def dtype_from_json(rows: list[list[Any]], itemsize: int) -> np.dtype:
    """The inverse of `dtype_to_json`."""
    return np.dtype(
        {
            "names": [name for name, *_ in rows],
            "formats": [(kind, (n,)) if n else kind for _, kind, _, n in rows],
            "offsets": [offset for _, _, offset, _ in rows],
            "itemsize": itemsize,
        }
    )


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with a checksum of its other members."""
    held = {key: value for key, value in content.items() if key != "checksum"}
    return {"checksum": digest(json.dumps(held).encode()), **held}


def is_whole(content: dict[str, Any]) -> bool:
    """Whether a JSON object matches its checksum."""
    return bool(with_checksum(content)["checksum"] == content.get("checksum"))


def sealed_bytes(content: dict[str, Any], indent: int | None = None) -> bytes:
    """A JSON object as the bytes of a file that ends with a checksum of all bytes before its digits."""
    held = json.dumps({key: value for key, value in content.items() if key != "checksum"}, indent=indent)
    body = f"{held.removesuffix('}').rstrip()}, ".encode() + SEAL
    return body + f'{digest(body)}"}}\n'.encode()


def is_unchanged(raw: bytes, content: dict[str, Any]) -> bool:
    """Whether a file's bytes match their seal; before there were seals, whether its content, as Python writes it, matches."""
    body, digits = raw[:-SEAL_BYTES], raw[-SEAL_BYTES:].removesuffix(b'"}\n')
    return digest(body).encode() == digits if body.endswith(SEAL) else is_whole(content)


def check_shape(path: Path, manifest: Any) -> None:
    """Raise RecordingError if a part of the manifest has the wrong type."""
    if not isinstance(manifest, dict):
        raise RecordingError(f"{path}/manifest.json is not a JSON object; record again")
    for kind, keys in SHAPE.items():
        for key in keys.split():
            value = manifest.get(key)
            rows = value if kind is list else value.values() if isinstance(value, dict) and key == "engines" else []
            if value is not None and not (isinstance(value, kind) and all(isinstance(row, dict) for row in rows)):
                raise RecordingError(f"{path}/manifest.json is damaged (at {key}); record again")


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest atomically: a reader sees either the old or the new one."""
    temporary = folder / "manifest.json.new"
    indent = 1 if manifest.get("state") == "complete" else None  # without is ten times as fast, and this happens every second
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:  # exclusive creation: others who may write to the folder cannot redirect it by a link
        file.write(sealed_bytes(manifest, indent))
    os.replace(temporary, folder / "manifest.json")


class Recording:
    """A recording opened for reading.

    `manifest` is the parsed manifest.json; `layouts` holds (number, dtype) of each record kind, with the fields of
    `struct rec_<kind>` in bpf/records.h (including the header's ts, pid, tid, kind, cpu, engine). `is_whole` is false if the
    manifest was changed after it was written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            raw = (self.path / "manifest.json").read_bytes()
            self.manifest: dict[str, Any] = json.loads(raw)
        except FileNotFoundError:
            hint = ", but tables, as `moescope import` writes without --onto RUN" if any(self.path.glob("*.parquet")) else ""
            raise RecordingError(f"{self.path} is not a recording: it has no manifest.json{hint}") from None
        except (ValueError, OSError, RecursionError) as error:
            raise RecordingError(f"{self.path}/manifest.json cannot be read: {error}") from None
        self.is_whole = isinstance(self.manifest, dict) and (is_unchanged(raw, self.manifest) or not self.was_sealed)
        if not self.is_whole or "checksum" not in self.manifest:
            doubts.append(str(self.path))
        check_shape(self.path, self.manifest)
        note_emulator((self.manifest.get("qnn") or {}).get("emulator"))
        version = self.manifest.get("schema_version")
        if version != SCHEMA_VERSION:
            raise RecordingError(
                f"{self.path} has schema version {version}, this program reads {SCHEMA_VERSION}; "
                "use the MoEScope release that wrote it, or record again"
            )
        try:
            self.layouts = {
                name: (int(layout["kind"]), dtype_from_json(layout["fields"], layout["bytes"]))
                for name, layout in self.manifest["layouts"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{self.path}/manifest.json is damaged (layouts: {error!r}); record again") from None

    @property
    def has_sums(self) -> bool:
        """Whether its streams were written with checksums: by the manifest, or because the files exist."""
        there = any(sums_of(self.path / f"{stream}.bin").exists() for stream in STREAMS)
        return there or bool(self.manifest.get("checksums"))

    @property
    def was_sealed(self) -> bool:
        """Whether its manifest was written with a checksum, which may have been lost."""
        return "checksum" in self.manifest or self.has_sums

    def slot_count(self, stream: str) -> int:
        """Number of whole slots of `events` or `details` that are on disk now."""
        path = self.path / f"{stream}.bin"
        return path.stat().st_size // STREAMS[stream] if path.exists() else 0

    def map_slots(self, stream: str, begin: int, end: int) -> np.ndarray:
        """Slots `begin` to `end` of a stream, uint8 [n, slot bytes], mapped from disk while the array is in use."""
        width = STREAMS[stream]
        if begin >= end:
            return np.empty((0, width), np.uint8)
        return np.memmap(self.path / f"{stream}.bin", np.uint8, "r", offset=begin * width, shape=(end - begin, width))


def kinds_of(slots: np.ndarray) -> np.ndarray:
    """The record kind of each slot, shape [n]."""
    return slots[:, KIND_OFFSET : KIND_OFFSET + 2].view("<u2")[:, 0]


def records_in_slots(slots: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The records in `slots`, shape [n]."""
    return np.ascontiguousarray(slots[:, RING_HEADER_BYTES : RING_HEADER_BYTES + dtype.itemsize]).view(dtype)[:, 0]
