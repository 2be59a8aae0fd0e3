"""Access to files that no path leads to from here: below another root, only in memory, or deleted while mapped."""

import os
import re
import stat

MEMORY = "/memfd:"  # the kernel's prefix for the names of files in memory
DESCRIPTOR = re.compile(r"/(?:dev|proc/(?:self|thread-self|\d+))/fd/(\d+)")
MOST_LINKS = 40  # the kernel's limit too
_ways: dict[str, str] = {}  # displayed path → path to open


def note(shown: str, way: str) -> str:
    """Remember the path that opens a file under the path that is displayed; returns the latter."""
    _ways.setdefault(shown, way)
    return shown


def way_to(shown: str) -> str:
    """The path that opens a file."""
    return _ways.get(shown, shown)


def real(shown: str) -> str:
    """The path with its links resolved; unchanged if it only has meaning elsewhere."""
    return shown if shown in _ways else os.path.realpath(shown)


def within(root: str, path: str) -> str:
    """A path below another root with its links resolved there; raises OSError if they form a cycle."""
    done, parts, links = "", path.split("/"), 0
    while parts:
        part = parts.pop(0)
        here = os.path.dirname(done) if part == ".." else os.path.join(done, part) if part not in ("", ".") else done
        if not os.path.islink(f"{root}/{here}"):
            done = here
        elif links == MOST_LINKS:
            raise OSError(f"too many links: {path}")
        else:
            target, links = os.readlink(f"{root}/{here}"), links + 1
            parts = target.split("/") + parts
            done = "" if target.startswith("/") else done
    return f"{root}/{done}"


def opened(pid: int, path: str) -> str:
    """The displayed path of a file that a process opens as `path`; raises OSError if there is no such file."""
    if number := DESCRIPTOR.fullmatch(path):
        return descriptor(f"/proc/{pid}/fd/{number[1]}")
    here = os.path.join(os.readlink(f"/proc/{pid}/cwd"), path)
    there = within(f"/proc/{pid}/root", here)
    if os.path.exists(here) and (not os.path.exists(there) or os.path.samefile(here, there)):
        return here
    os.stat(there)
    return note(there, there)


def descriptor(way: str) -> str:
    """The displayed path of a process's open file, given its link in /proc; raises OSError if there is none."""
    path = os.readlink(way)
    if not path.startswith(MEMORY):
        return path
    file = os.open(way, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status, shown = os.fstat(file), in_memory(path, os.fstat(file).st_ino)
    if shown in _ways or not stat.S_ISREG(status.st_mode):
        os.close(file)
        return shown
    return note(shown, f"/proc/self/fd/{file}")  # stays open: the process may close its descriptor once the library is loaded


def in_memory(path: str, inode: int) -> str:
    """The displayed path of a file in memory, which has none: its name and inode, since several may share a name."""
    return f"{MEMORY}{inode}/{path.removeprefix(MEMORY).removesuffix(' (deleted)')}"


def mapped(pid: int, path: str, inode: int, span: str) -> str:
    """The displayed path of a file that a process maps at `span` (start-end), from its path and inode in /proc/PID/maps."""
    below, way = f"/proc/{pid}/root{path}", f"/proc/{pid}/map_files/{span}"
    if path.startswith(MEMORY):
        return note(in_memory(path, inode), way)
    if _inode(path) == inode:
        return path
    if _inode(below) == inode:
        return note(below, below)
    return note(path if path.endswith(" (deleted)") else f"{path} (as mapped)", way)


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return -1
