"""A target with known I/O: io_steps.py FILE; each operator does one kind of I/O, and prints it as JSON.

FILE has at least 4 MiB; its pages are dropped first, and readahead is off.
"""

import json
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module

PAGE = mmap.PAGESIZE
TOUCHED = [7, 300, 64, 301, 700]
READS = [(1 << 20, 3 * PAGE), ((1 << 20) + 64 * PAGE, 100), (2 << 20, 5 * PAGE)]
ANONYMOUS_PAGES, SLEEPS = 50, 6


def thread_usage() -> list[int]:
    now = resource.getrusage(resource.RUSAGE_THREAD)
    return [now.ru_majflt, now.ru_minflt, now.ru_nvcsw]


def main() -> None:
    probes = import_module("runtime.telemetry._probes")
    fd = os.open(sys.argv[1], os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    anonymous = mmap.mmap(-1, ANONYMOUS_PAGES * PAGE)
    anonymous.madvise(mmap.MADV_NOHUGEPAGE)

    def touch_file() -> None:
        for page in TOUCHED:
            mapped[page * PAGE]

    def touch_memory() -> None:
        for page in range(ANONYMOUS_PAGES):
            anonymous[page * PAGE] = 1

    def read_at() -> None:
        probes.load__begin(0, 5, sum(size for _, size in READS), 1, 1)
        for offset, size in READS:
            assert len(os.pread(fd, size, offset)) == size
        probes.load__end(0, 5, 0, 0)

    def read_on() -> None:
        os.lseek(fd, 3 << 20, os.SEEK_SET)
        os.read(fd, 1000)
        os.readv(fd, [bytearray(10), bytearray(20)])
        os.preadv(fd, [bytearray(40)], PAGE)
        os.read(pipe, 1)

    def sleep() -> None:
        for _ in range(SLEEPS):
            time.sleep(0.002)

    pipe, other_end = os.pipe()
    os.write(other_end, b"x")
    works: list[Callable[[], object]] = [lambda: None, touch_file, touch_memory, read_at, read_on, sleep, touch_file]
    used = []
    probes.token__begin(0, 2, 1, 0)
    for number, work in enumerate(works):
        probes.op__begin(1, number, 1, 100 + number, b"")
        before = thread_usage()
        work()
        after = thread_usage()
        probes.op__end(100 + number)
        used.append([b - a for a, b in zip(before, after, strict=True)])
    probes.token__end(0, 0, 0)

    def operator_of_its_own() -> None:
        time.sleep(0.2)
        probes.op__begin(1, 90, 1, 990, b"")
        sleep()
        probes.op__end(990)

    thread = threading.Thread(target=operator_of_its_own)
    thread.start()
    thread.join()
    print(json.dumps({"used": used, "inode": os.fstat(fd).st_ino}))


if __name__ == "__main__":
    main()
