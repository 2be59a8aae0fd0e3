"""A target whose truth is known: emits token steps through the runtime's probes.

    steps.py COUNT SECONDS_BETWEEN [--late SECONDS] [--child]

--late loads the probes' library only after a while; --child emits the same steps in a forked child too.
"""

import argparse
import os
import sys
import time
from importlib import import_module


def emit(count: int, pause: float) -> None:
    probes = import_module("runtime._probes")
    for step in range(count):
        probes.token__begin(step, 2, 1, step)
        if pause:
            time.sleep(pause)
        probes.token__end(step, step + 7)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("pause", type=float)
    parser.add_argument("--late", type=float, default=0.0)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    time.sleep(args.late)
    child = os.fork() if args.child else -1
    emit(args.count, args.pause)
    if child == 0:
        os._exit(0)
    if child > 0:
        os.waitpid(child, 0)
    print(f"done {args.count}", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
