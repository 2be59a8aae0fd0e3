"""A target with known behaviour: emits token steps through the runtime's probes.

    steps.py COUNT SECONDS_BETWEEN [--until FILE] [--late SECONDS] [--child] [--operators N]
             [--slow SECONDS --slow-every N | --slow-while FILE]

--until ends it as soon as FILE exists. --late loads the probes' library after SECONDS; --child emits the same steps also in a
forked child. --slow is the duration of every N-th step, or of every step while FILE exists. --operators runs N operators
in each step, and evicts an expert.
"""

import argparse
import os
import sys
import time
from importlib import import_module


def emit_steps(args: argparse.Namespace) -> int:
    probes = import_module("runtime.telemetry._probes")
    for step in range(args.count):
        if args.until and os.path.exists(args.until):
            return step
        slow = (args.slow_every and step % args.slow_every == 0) or (args.slow_while and os.path.exists(args.slow_while))
        pause = args.slow if slow else args.pause
        probes.token__begin(step, 2, 1, step)
        for number in range(args.operators):
            probes.op__begin(number % 4, 0, 1, number + 1, b"")
            probes.op__end(number + 1)
        if args.operators:
            probes.evict(0, step, 1, 1)
        if pause:
            time.sleep(pause)
        probes.token__end(step, step + 7, 0)
    return int(args.count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("pause", type=float)
    parser.add_argument("--until", default="")
    parser.add_argument("--late", type=float, default=0.0)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--slow-every", type=int, default=0)
    parser.add_argument("--slow-while", default="")
    parser.add_argument("--slow", type=float, default=0.03)
    parser.add_argument("--operators", type=int, default=0)
    args = parser.parse_args()
    time.sleep(args.late)
    child = os.fork() if args.child else -1
    count = emit_steps(args)
    if child == 0:
        os._exit(0)
    if child > 0:
        os.waitpid(child, 0)
    print(f"done {count}", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
