"""Damage that a recording's checksums reveal: the file, the position, and the affected records."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from analyzer.records.contents import Contents
from tracer.recording import checksums
from tracer.recording.format import STREAMS


def damaged_places(contents: Contents) -> list[str]:
    """One line for each damaged place; empty for recordings without checksums."""
    kind = contents.recording.manifest.get("checksums")
    if kind not in (None, checksums.METHOD):
        return [f"its checksums are of an unknown kind ({kind}): damage would go unnoticed"]
    lines = [] if contents.recording.is_whole else ["manifest.json was changed after it was written: every figure may be wrong"]
    if contents.recording.has_sums:
        lines += [line for stream in STREAMS for line in _of_stream(contents, stream)]
    return [*lines, *_of_stacks(contents.recording.path / "stacks.bin")]


def _of_stacks(path: Path) -> Iterator[str]:
    with suppress(OSError):  # recordings without stacks, and earlier ones without checksums of them
        for begin, end in checksums.check_file(path)[0]:
            yield f"{path.name} is damaged between bytes {begin:,} and {end:,}: stacks may be wrong or missing"


def _of_stream(contents: Contents, stream: str) -> Iterator[str]:
    path, width = contents.recording.path / f"{stream}.bin", STREAMS[stream]
    try:
        stretches, sealed = checksums.check_file(path)
    except OSError:
        yield f"{checksums.sums_of(path).name} cannot be read: damage to {path.name} would go unnoticed"
        return
    size = contents.streams[stream].slots * width
    for begin, end in stretches:
        ends = f", the file ends at {size:,} and the rest is lost" if end > size else ""
        cost = _damage_cost(contents, stream, begin, min(end, size))
        yield f"{path.name} is damaged between bytes {begin:,} and {end:,}{ends}: {cost}"
    if size > sealed:
        yield f"the last {(size - sealed) // width:,} records of {path.name} have no checksum: the tracer did not exit cleanly"


def _damage_cost(contents: Contents, stream: str, begin: int, end: int) -> str:
    width = STREAMS[stream]
    touched = contents.by_kind(stream, begin // width, max(begin, end) // width)
    kinds = sorted(touched.rows, key=lambda kind: -len(touched.rows[kind]))
    names = ", ".join(contents.names.get(kind, f"kind {kind}") for kind in kinds[:3])
    since, until = ((at - contents.first_ns) / 1e9 for at in (touched.first_ns, touched.last_ns))
    count = sum(map(len, touched.rows.values()))
    return (
        f"{count:,} records ({names}) from {since:.3f} s to {until:.3f} s may be wrong" if count else "no record of them is left"
    )
