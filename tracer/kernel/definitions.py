"""What bpf/ defines, by name, from the compiled object: constants, records, the structs of maps, numbers of programs."""

from functools import cache
from typing import Any

import numpy as np

from tracer.errors import RequirementError
from tracer.kernel.btf import STRUCT, UNION, Btf, BtfError
from tracer.kernel.libbpf import symbols
from tracer.recording.format import dtype_to_json
from tracer.recording.paths import BPF_OBJECT


@cache
def types() -> Btf:
    """All types. Raises RequirementError if the object has not been built."""
    if not BPF_OBJECT.exists():
        raise RequirementError(f"{BPF_OBJECT.name} has not been built; run `make build`")
    return Btf.of_file(BPF_OBJECT)


def layouts() -> dict[str, Any]:
    """The layout of every record, for the manifest."""
    numbers = enumeration("record_kind")
    layouts = {}
    for name, type_id, _ in types().members(types().find(UNION, "record")):
        dtype = types().dtype(type_id)
        layouts[name] = {"kind": numbers[f"KIND_{name.upper()}"], "bytes": dtype.itemsize, "fields": dtype_to_json(dtype)}
    return layouts


def enumeration(name: str) -> dict[str, int]:
    """Name → value of an enum."""
    return types().enum(name)


def name_in(enum: str, number: int) -> str:
    """The name of an enum's member with this value."""
    return next(name for name, value in enumeration(enum).items() if value == number)


@cache
def _constants() -> dict[str, int]:
    return {name: value for each in types().enums() for name, value in types().enum(each).items()}


def constant(name: str) -> int:
    """The value of an enum's member; raises BtfError if there is none."""
    try:
        return _constants()[name]
    except KeyError:
        raise BtfError(f"{BPF_OBJECT.name} has no constant {name}; run `make build`") from None


def struct_of(name: str) -> np.dtype:
    """The dtype of a struct."""
    return types().dtype(types().find(STRUCT, name))


def packed(name: str, **members: int | bytes) -> bytes:
    """A struct with all of its members, given by name; raises BtfError if one is missing or unknown."""
    row = np.zeros((), struct_of(name))
    wrong = members.keys() ^ set(row.dtype.names or ())
    if wrong:
        raise BtfError(f"struct {name}: {', '.join(sorted(wrong))} missing or unknown; run `make build`")
    for member, value in members.items():
        row[member] = value
    return row.tobytes()


def program_numbers() -> dict[str, int]:
    """Program → the number under which it counts its runs: the offset of its mark in the object's section of marks."""
    return {name.removeprefix("number_"): at for name, at in symbols(BPF_OBJECT).items() if name.startswith("number_")}
