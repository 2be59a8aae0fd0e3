"""The environment of a run, and differences between the environments of two sides."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from analyzer.records.manifest import command_of, section

MACHINE = ("arch", "cpu_model", "cpus", "memory_bytes", "kernel", "os", "governor")
MUST_MATCH = {"arch", "cpu_model", "cpus", "kernel", "governor", "memory_bytes", "NPU", "model", "steps"}
MAYBE_UNKNOWN = {"model", "model file"}
"""In some recordings only: no difference is reported where one side lacks them."""
TRACING = ("loader", "buffer", "levels", "program")
SHOWN = 3


@dataclass(frozen=True)
class Difference:
    """One difference: its value on either side, and whether it makes the comparison unfair."""

    what: str
    base: str
    cand: str
    unfair: bool


def environment_of(manifest: dict[str, Any]) -> dict[str, str]:
    """Machine, tracing, engine libraries by build id, NPU, model, command: name → text. Unknown things are absent."""
    machine = section(manifest, "machine")
    facts = {name: str(machine[name]) for name in MACHINE if machine.get(name) not in (None, "")}
    for name in TRACING:
        value = manifest.get(name)
        if value:
            facts[name] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    for engine in section(manifest, "engines").values():
        for library in (engine.get("libraries") or []) if isinstance(engine, dict) else []:
            facts[f"library {str(library.get('path', '')).rsplit('/', 1)[-1]}"] = str(library.get("build_id") or "no build id")
    qnn = section(manifest, "qnn")
    if qnn:
        facts["NPU"] = "HTP emulator" if qnn.get("emulator") else f"QNN backend {qnn.get('backend')}"
        facts["QNN API"] = str(qnn.get("api", ""))
    facts |= model_identity(manifest)
    facts["command"] = " ".join(command_of(manifest))
    return facts


def begin_s(manifest: dict[str, Any]) -> float:
    """The begin of a recording in s; NaN if the manifest lacks it."""
    try:
        return float(manifest["clocks"][0]["realtime_ns"]) / 1e9
    except (TypeError, KeyError, IndexError, ValueError):
        return math.nan


def model_identity(manifest: dict[str, Any]) -> dict[str, str]:
    """The identity of the model, independent of file names, and its file names."""
    files = manifest.get("models") or []
    if not files:
        return {}
    prints = sorted(str(file["fingerprint"]) for file in files)
    fingerprint = prints[0] if len(prints) == 1 else hashlib.sha256(" ".join(prints).encode()).hexdigest()
    size = sum(int(file["bytes"]) for file in files)
    names = sorted(PurePath(file["path"]).name for file in files)
    return {"model": f"{fingerprint[:12]}, {size:,} bytes", "model file": ", ".join(names)}


def environment_differences(base: list[dict[str, str]], cand: list[dict[str, str]]) -> list[Difference]:
    """Differences between the sides, or within one; unfair ones first."""
    names = dict.fromkeys(name for environment in (*base, *cand) for name in environment)
    differing = []
    for name in names:
        sides = [list(dict.fromkeys(environment.get(name, "") for environment in side)) for side in (base, cand)]
        if name in MAYBE_UNKNOWN and [""] in sides:
            continue
        if len(sides[0]) > 1 or len(sides[1]) > 1 or sides[0] != sides[1]:
            left, right = (" | ".join(text or "-" for text in side[:SHOWN]) for side in sides)
            unfair = name in MUST_MATCH or name in TRACING
            differing.append(Difference(name, left, right, unfair))
    return sorted(differing, key=lambda d: not d.unfair)
