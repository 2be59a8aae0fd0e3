"""A target whose CPU time is known: prefill computes all the time, decode steps compute a part of theirs and then sleep.

    powered_steps.py PID_FILE LOG REQUESTS PREFILL_S DECODE_STEPS BUSY_S SLEEP_S [CLOCK_FILE]

CPU seconds are those at the highest clock; at the one that CLOCK_FILE shows they are as many times more.
LOG gets a line of JSON for each step: phase (1 prefill, 2 decode), tokens, and at its begin and end monotonic ns and CPU ns.
"""

import json
import os
import sys
import time
from pathlib import Path

from runtime.telemetry import _probes  # type: ignore[attr-defined]

PREFILL, DECODE, PROMPT = 1, 2, 64
MOST_KHZ = 2_800_000


def moment() -> tuple[int, int]:
    return time.monotonic_ns(), time.process_time_ns()


def clock_share() -> float:
    return int(Path(sys.argv[8]).read_text()) / MOST_KHZ if len(sys.argv) > 8 else 1.0


def compute(cpu_s: float) -> None:
    until = time.process_time() + cpu_s / clock_share()
    while time.process_time() < until:
        sum(range(200))


def step(number: int, phase: int, tokens: int, position: int, busy_s: float, sleep_s: float) -> dict[str, object]:
    _probes.token__begin(number, phase, tokens, position)
    begin = moment()
    compute(busy_s)
    time.sleep(sleep_s)
    end = moment()
    _probes.token__end(number, 7, 0)
    return {"phase": phase, "tokens": tokens, "begin": begin, "end": end}


def main() -> None:
    pid_file, log = sys.argv[1:3]
    requests, decodes = int(sys.argv[3]), int(sys.argv[5])
    prefill_s, busy_s, sleep_s = float(sys.argv[4]), float(sys.argv[6]), float(sys.argv[7])
    Path(pid_file + ".new").write_text(str(os.getpid()))
    os.rename(pid_file + ".new", pid_file)
    rows, number = [], 0
    for _ in range(requests):
        rows.append(step(number, PREFILL, PROMPT, 0, prefill_s, 0))
        rows += [step(number + 1 + i, DECODE, 1, PROMPT + i, busy_s, sleep_s) for i in range(decodes)]
        number += decodes + 1
    time.sleep(0.2)
    with Path(log).open("a") as file:
        file.write("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
