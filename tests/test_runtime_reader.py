"""Explicit reads: the right bytes from any offset, with and without O_DIRECT, and one line for every way a file can fail."""

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.backends.cpu import CpuBackend
from runtime.cache_rules.rule import PIECE
from runtime.errors import PackageError
from runtime.graphs.builder import GraphBuilder
from runtime.graphs.quantize import Precision
from runtime.package.convert import WeightFile
from runtime.package.huge_pages import HUGE_PAGE, huge_bytes
from runtime.package.layout import Package
from runtime.package.reader import ALIGNMENT, BlockPool, FileRange, Reader, page_aligned

SIZE = 3 * ALIGNMENT + 123


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("reader") / "experts.bin"
    content = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()
    path.write_bytes(content)
    return path, content


@pytest.fixture(scope="module", params=[True, False], ids=["direct", "buffered"])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    reader = Reader(request.param)
    yield reader
    reader.close()


@given(offset=st.integers(0, SIZE - 1), data=st.data())
def test_a_place_is_read_exactly_and_its_block_is_aligned(
    reader: Reader, stored: tuple[Path, bytes], offset: int, data: st.DataObject
) -> None:
    path, content = stored
    count = data.draw(st.integers(1, SIZE - offset))
    block = BlockPool().take(count + offset % ALIGNMENT)
    assert block.ctypes.data % ALIGNMENT == 0
    assert reader.read(FileRange(path, offset, count), block).tobytes() == content[offset : offset + count]


@pytest.mark.needs("dropping pages")
def test_reads_leave_nothing_in_the_page_cache(reader: Reader, stored: tuple[Path, bytes]) -> None:
    path, _ = stored
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = read_bytes()
    for _ in range(4):
        reader.read(FileRange(path, 0, SIZE), BlockPool().take(SIZE))
    assert read_bytes() - before >= 4 * 3 * ALIGNMENT, "every read goes to the device"


def read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def test_a_missing_and_a_short_file_are_told_in_one_line(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="gone"):
        reader.read(FileRange(tmp_path / "gone.bin", 0, 10), BlockPool().take(10))
    (tmp_path / "short.bin").write_bytes(b"x" * 5000)
    with pytest.raises(PackageError, match="3192 bytes"):
        reader.read(FileRange(tmp_path / "short.bin", 0, 8192), BlockPool().take(8192))


def test_others_may_come_between_the_pieces_of_a_read(tmp_path: Path) -> None:
    path, content = tmp_path / "large.bin", os.urandom(2 * PIECE + ALIGNMENT + 5)
    path.write_bytes(content)
    block, between = BlockPool().take(len(content)), []
    reader = Reader(between=lambda: between.append(len(between)))
    assert bytes(reader.read(FileRange(path, 0, len(content)), block)) == content
    assert len(between) >= 2
    reader.close()


def test_more_files_than_stay_open_can_be_read(reader: Reader, tmp_path: Path) -> None:
    block = BlockPool().take(4)
    for i in range(200):
        (tmp_path / f"{i}").write_bytes(b"%04d" % i)
    before = len(os.listdir("/proc/self/fd"))
    for i in (*range(200), *range(200)):
        assert reader.read(FileRange(tmp_path / f"{i}", 0, 4), block).tobytes() == b"%04d" % i
    assert len(os.listdir("/proc/self/fd")) - before <= 128


def test_blocks_are_reused_and_only_a_few_free_ones_keep_their_memory() -> None:
    pool = BlockPool(spare=2)
    blocks = [pool.take(5000) for _ in range(4)]
    addresses = [block.ctypes.data for block in blocks]
    assert {len(block) for block in blocks} == {page_aligned(5000)} and len(set(addresses)) == 4
    for block in blocks:
        block[:] = 7
        pool.give(block)
    assert [block.min() for block in blocks] == [7, 7, 0, 0]
    again = [pool.take(5000).ctypes.data for _ in range(4)]
    assert set(again[:2]) == set(addresses[:2]) and set(again) == set(addresses)


def test_a_block_is_taken_by_one_thread_at_a_time() -> None:
    pool = BlockPool()
    taking = Thread(target=pool.take, args=(5000,))
    with pool._lock:
        taking.start()
        taking.join(0.2)
        assert taking.is_alive() and not pool._empty
    taking.join()
    assert pool._empty


def test_large_blocks_ask_for_huge_pages_and_small_ones_take_no_more_than_they_write() -> None:
    if "[never]" in (Path("/sys/kernel/mm/transparent_hugepage/enabled")).read_text():
        pytest.skip("huge pages are switched off")
    pool, small, before = BlockPool(), [], held("RssAnon")
    for _ in range(8):
        small.append(pool.take(10_000))
        small[-1][:] = 1
    assert held("RssAnon") - before < 1 << 20
    large = [pool.take(5 << 20) for _ in range(8)]
    assert all(asks_for_huge_pages(block) for block in large) and not any(map(asks_for_huge_pages, small))


def test_weights_that_were_just_written_are_read_in_huge_pages_and_are_the_same(tmp_path: Path) -> None:
    file, weights = tmp_path / "layer.bin", np.random.default_rng(0).standard_normal((2048, 4096)).astype(np.float32)
    with WeightFile(file) as stored:
        g = GraphBuilder("linear", stored.store("linear"))
        g.input("x", ("T", 4096))
        g.linear("x", "w", weights, Precision(4, 32), output="y")
        g.output("y", ("T", 2048))
    os.sync()
    package = Package.__new__(Package)
    package.folder, package._maps, package._resident, package._huge_pages = tmp_path, {}, set(), True
    session = CpuBackend(package, 1).create("linear", g.model())
    assert np.abs(session.run(None, {"x": weights[:1]})[0] - weights[:1] @ weights.T).max() < 60, "4096 without its own row"
    assert not package._huge_pages or huge_bytes(file) >= HUGE_PAGE


def asks_for_huge_pages(block: np.ndarray) -> bool:
    """Whether the mapping that holds a block has been advised so; whether it has any depends on how fragmented memory is."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line[0].isupper():
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            inside = begin <= block.ctypes.data < end
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


def held(field: str) -> int:
    """Bytes that this process has of something."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
