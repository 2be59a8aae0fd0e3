"""A program that drives QAIRT's C API itself, and prints as JSON what it called: graphs, executes with status and times.

Arguments: library, and options as key=value: executes, later (asynchronous ones), graph (its interface's number), loop (1: says
`ready` after it got its tables, and executes until a line comes), asks (how often it gets its tables).
"""

import ctypes as c
import json
import sys
import threading
import time
from typing import Any

FUNCTIONS = {
    "backendCreate": (4000, 2), "backendFree": (4000, 3), "createProfile": (4000, 8), "profileFree": (12000, 2),
    "contextCreate": (5000, 2), "contextFree": (5000, 3), "getBinary": (5000, 6), "createFromBinary": (5000, 8),
    "createGraph": (5000, 10), "retrieveGraph": (5000, 11), "applyBinarySection": (5000, 17), "finalize": (0, 6),
    "execute": (0, 9), "executeAsync": (0, 10),
}  # fmt: skip
"""Name → number of the interface (0: that of graphs), word of its table."""


class Qairt:
    """The functions of a library, and what was called."""

    def __init__(self, path: str, graph: int):
        self.library = c.CDLL(path)
        make, tables = c.CFUNCTYPE(c.c_uint64, *[c.c_void_p] * 9), {}
        for number in (4000, 5000, graph, 12000):
            out = c.c_void_p()
            if self.library.QairtInterface_getInterface(c.c_uint64(number), c.byref(out)) == 0 and out.value:
                tables[number] = out.value
        self.functions = {
            name: make(c.c_uint64.from_address(tables[number or graph] + 8 * word).value)
            for name, (number, word) in FUNCTIONS.items()
        }
        self.calls: dict[str, int] = {}

    def __call__(self, name: str, *args: Any) -> int:
        self.calls[name] = self.calls.get(name, 0) + 1
        given = [c.cast(a, c.c_void_p) if not isinstance(a, int | None) else a for a in args]
        return int(self.functions[name](*given, *[None] * (9 - len(given))))

    def made(self, name: str, *args: Any) -> int:
        """The handle that a call writes through its last argument."""
        out = c.c_void_p()
        assert self(name, *args, c.byref(out)) == 0
        return out.value or 0


def execute(qairt: Qairt, graph: int, name: str, runs: list[dict[str, Any]]) -> None:
    begin = time.monotonic_ns()
    status = qairt("execute", graph, None, 2, None, 1, None, None)
    runs.append({"graph": name, "handle": graph, "status": status, "begin": begin, "end": time.monotonic_ns()})


def loop(qairt: Qairt, graph: int, runs: list[dict[str, Any]]) -> None:
    """Execute until a line comes."""
    print("ready", flush=True)
    asked = threading.Event()

    def wait_for_line() -> None:
        sys.stdin.readline()
        asked.set()

    threading.Thread(target=wait_for_line).start()
    while not asked.is_set():
        execute(qairt, graph, "", runs)


def execute_later(qairt: Qairt, graph: int, number: int) -> list[dict[str, int]]:
    """Executions in flight together: when they were submitted, their status, and when they ended."""
    notify = c.cast(qairt.library.fake_notify, c.c_void_p)
    runs = []
    for i in range(number):
        begin = time.monotonic_ns()
        runs.append({"begin": begin, "status": qairt("executeAsync", graph, None, 1, None, 1, None, None, notify, 1 + i)})
    while qairt.library.fake_done() < sum(run["status"] == 0 for run in runs):
        time.sleep(0.001)
    ends = (c.c_uint64 * 1024).in_dll(qairt.library, "fake_ends")
    return [run | {"end": ends[1 + i]} for i, run in enumerate(runs)]


def main() -> None:
    options = {"executes": 10, "later": 0, "graph": 6000, "loop": 0, "asks": 1}
    options |= {key: int(value) for key, value in (word.split("=") for word in sys.argv[2:])}
    qairt = [Qairt(sys.argv[1], options["graph"]) for _ in range(options["asks"])][-1]
    runs: list[dict[str, Any]] = []
    backend = qairt.made("backendCreate", None, None)
    profile = qairt.made("createProfile", backend, 1)
    context = qairt.made("contextCreate", backend, None, None)
    graph = qairt.made("createGraph", context, b"first", None)
    qairt("finalize", graph, None, None)
    written = c.c_uint64()
    qairt("getBinary", context, None, c.byref(written))
    again = qairt.made("createFromBinary", backend, None, None, None, None, None)
    other = qairt.made("retrieveGraph", again, b"second")
    if options["loop"]:
        loop(qairt, other, runs)
    for _ in range(options["executes"] // 2):
        execute(qairt, graph, "first", runs)
        execute(qairt, other, "second", runs)
    qairt("applyBinarySection", again, other, 1, None, None, None)
    late = execute_later(qairt, graph, options["later"])
    for handle in (context, again):
        qairt("contextFree", handle, None)
    qairt("profileFree", profile)
    qairt("backendFree", backend)
    print(json.dumps({"calls": qairt.calls, "runs": runs, "late": late, "written": written.value}))


if __name__ == "__main__":
    main()
