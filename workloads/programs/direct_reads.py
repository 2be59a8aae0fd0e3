"""Reads pages of a disk or a file one after the other, bypassing the page cache: direct_reads.py FILE READS."""

import mmap
import os
import sys

STRIDE = 8  # pages, so that no two reads are merged into one request


def main() -> None:
    fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
    page = mmap.mmap(-1, mmap.PAGESIZE)
    for number in range(int(sys.argv[2])):
        os.preadv(fd, [page], number * STRIDE * mmap.PAGESIZE)


if __name__ == "__main__":
    main()
