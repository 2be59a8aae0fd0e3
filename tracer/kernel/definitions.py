"""What bpf/ defines, by name, from the compiled object: constants, records, the structs of maps, numbers of programs."""

from functools import cache
from typing import Any

from tracer.errors import RequirementError
from tracer.kernel.btf import UNION, Btf, BtfError
from tracer.probes.elf import read_binary
from tracer.recording.format import dtype_to_json
from tracer.recording.paths import BPF_OBJECT


@cache
def bpf_types() -> Btf:
    """All types. Raises RequirementError if the object has not been built."""
    if not BPF_OBJECT.exists():
        raise RequirementError(f"{BPF_OBJECT.name} has not been built; run `make build`")
    return Btf.of_file(BPF_OBJECT)


def record_layouts() -> dict[str, Any]:
    """The layout of every record, for the manifest."""
    numbers = enum_values("record_kind")
    layouts = {}
    for name, type_id, _ in bpf_types().members(bpf_types().find(UNION, "record")):
        dtype = bpf_types().dtype(type_id)
        layouts[name] = {"kind": numbers[f"KIND_{name.upper()}"], "bytes": dtype.itemsize, "fields": dtype_to_json(dtype)}
    return layouts


def enum_values(name: str) -> dict[str, int]:
    """Name → value of an enum."""
    return bpf_types().enum(name)


def name_in(enum: str, number: int) -> str:
    """The name of an enum's member with this value."""
    return next(name for name, value in enum_values(enum).items() if value == number)


@cache
def _constants() -> dict[str, int]:
    return {name: value for each in bpf_types().enums() for name, value in bpf_types().enum(each).items()}


def constant(name: str) -> int:
    """The value of an enum's member; raises BtfError if there is none."""
    try:
        return _constants()[name]
    except KeyError:
        raise BtfError(f"{BPF_OBJECT.name} has no constant {name}; run `make build`") from None


def symbol_offsets() -> dict[str, int]:
    """Symbol name → offset in its section."""
    offsets = {}
    for entries, strings in read_binary(str(BPF_OBJECT)).tables:
        for name, value in zip(entries["name"].tolist(), entries["value"].tolist(), strict=True):
            offsets[strings[name : strings.index(b"\0", name)].decode()] = value
    return offsets


def program_numbers() -> dict[str, int]:
    """Program → the number under which it counts its runs: the offset of its mark in the object's section of marks."""
    return {name.removeprefix("number_"): at for name, at in symbol_offsets().items() if name.startswith("number_")}
