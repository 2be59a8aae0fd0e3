"""Each kind of wait has its cause, its line, who ended it, and the file that it waited for."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyzer.questions.findings import findings
from analyzer.questions.stacks import joined, waiting_places
from analyzer.tables.store import load_tables
from tests.conftest import ROOT, made_once, rest_long, trace

pytestmark = pytest.mark.needs("probes")
ROUNDS, PART = 12, 256 << 10
OTHER, ASLEEP, DISK = "lock or other thread", "asleep", "disk and faults"
PLANTED = {
    "mutex": (OTHER, "pthread_mutex_lock", "wait_mutex", "wake_mutex"),
    "storm": (OTHER, "pthread_mutex_lock", "wake_storm", "wake_storm"),
    "pipe": (OTHER, "read", "wait_pipe", "wake_pipe"),
    "sleep": (ASLEEP, "usleep", "wait_sleep", ""),
    "read": (DISK, "pread", "wait_read", ""),
    "fault": (DISK, "", "wait_fault", ""),
    "cond": (OTHER, "pthread_cond_wait", "wait_cond", "wake_cond"),
    "epoll": (OTHER, "epoll_wait", "wait_epoll", "wake_epoll"),
}
"""Kind → its cause, the C library's function, the program's, and the one of the thread that ends it."""
SHORT = ("storm", "read", "fault")
"""Kinds whose waits are as long as the machine makes them."""


def build_program(folder: Path) -> None:
    source = ROOT / "workloads" / "programs" / "waits.c"
    subprocess.run(["cc", "-O2", "-g", "-o", folder / "waits", source, "-lpthread"], check=True)
    with open(folder / "part", "wb") as file:
        file.write(np.random.default_rng(0).bytes(PART * ROUNDS))
    subprocess.run(["sync"], check=True)


@pytest.mark.needs("dropping pages")
@pytest.mark.parametrize("kind", rest_long(PLANTED, "mutex", "fault", "epoll"))
def test_a_planted_wait_has_its_cause_its_line_and_who_ended_it(kind: str, tmp_path: Path) -> None:
    place = made_once("planted waits", build_program)
    words = [str(place / "waits"), kind, str(ROUNDS), *([str(place / "part")] if kind in SHORT[1:] else [])]
    cause, library, own, waker = PLANTED[kind]
    shortest = "20us" if cause == DISK else "50us"  # a disk may answer in 50 us
    done = trace("run", "--no-views", "--stacks", "--long-wait", shortest, "-o", str(tmp_path / "run"), "--", *words)
    assert done.returncode == 0, done.stderr
    tables = load_tables(tmp_path / "run")
    places, waits = waiting_places(tables), joined(tables, "waits")
    lines = places[waits["stack_id"].to_numpy()]
    planted = f"{library} in {own} (waits.c:" if library else f"{own} (waits.c:"
    mine = waits[[line.startswith(planted) for line in lines]]
    assert len(mine) >= (1 if kind in SHORT else ROUNDS - 2), lines
    lacks_cpu = ("run queue",) if kind in SHORT else ()  # on a busy machine whoever is to go on may have none
    assert mine["cause"].isin((cause, *lacks_cpu)).mean() > (0.5 if kind == "storm" else 0.8), mine["cause"]
    assert kind == "storm" or mine["cause"].eq(cause).mean() > (0.4 if lacks_cpu else 0.8), mine["cause"]
    said: list[Any] = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("[["))
    truth = np.array(said)
    inside = np.searchsorted(truth[:, 0], mine["begin_ns"].to_numpy()) - 1
    if kind != "storm":
        assert (mine["end_ns"].to_numpy() <= truth[inside, 1]).all() and (inside >= 0).all()
    if waker:
        woken = mine[mine["waker_tid"] >= 0] if kind == "storm" else mine  # who ends a wait within 50 us is not recorded
        ended = places[woken["waker_stack_id"].to_numpy()]
        assert np.mean([f" in {waker} (waits.c:" in line or line.startswith(f"{waker} (") for line in ended]) > 0.7, ended
    found = next((one for one in findings(tables) if one.evidence.get("place", "").startswith(planted)), None)
    if kind not in SHORT:
        assert found and found.evidence["cause"] == cause
    if found and cause == DISK:
        assert found.evidence["does"].endswith("`part`")
        bound = re.search(r"at most (\d+)%$", found.text)
        assert bound is None or int(bound[1]) <= 100 * found.share + 1, found
