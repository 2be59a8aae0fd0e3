"""The USDT probes: where they stand, what they cost, and that they tell what the engine's own log tells."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from runtime.package.demo_model import write_demo_model
from runtime.telemetry import probes
from tests.runtime_models import PROMPT

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "runtime" / "telemetry" / "_probes.so"
built = pytest.mark.skipif(not probes.built, reason="runtime/telemetry/_probes.so is not built: run make")
ARGUMENTS = {
    "token__begin": 4,
    "token__end": 3,
    "op__begin": 6,
    "op__end": 2,
    "graph__begin": 6,
    "graph__end": 3,
    "expert__begin": 6,
    "expert__end": 2,
    "route": 5,
    "load__begin": 5,
    "load__end": 4,
    "evict": 4,
}
SCRIPT = """
usdt:LIB:moescope:graph__begin { @graphs[arg1, arg4] = count(); }
usdt:LIB:moescope:op__begin { @operators[arg0] = count(); }
usdt:LIB:moescope:op__end { @ended = count(); }
usdt:LIB:moescope:expert__begin { @experts[(int32)arg0, (int32)arg1] = count(); }
usdt:LIB:moescope:load__begin { @loads = count(); @bytes = sum(arg2); }
usdt:LIB:moescope:evict { @evictions = count(); }
usdt:LIB:moescope:token__end { @tokens[arg0] = max(arg1); }
usdt:LIB:moescope:route { @routed[(int32)arg0] = sum(arg1 * arg2); @first = sum(*(uint16*)uptr(arg3)); }
"""


@built
def test_every_probe_stands_on_a_nop_whose_note_names_all_arguments() -> None:
    elftools = pytest.importorskip("elftools.elf.elffile")
    with LIBRARY.open("rb") as file:
        elf = elftools.ELFFile(file)
        code = elf.get_section_by_name(".text")
        base = elf.get_section_by_name(".stapsdt.base")
        word = 4 if elf["e_machine"] == "EM_AARCH64" else 1
        nop = b"\x1f\x20\x03\xd5" if word == 4 else b"\x90"
        found = {}
        for note in elf.get_section_by_name(".note.stapsdt").iter_notes():
            description = note["n_desc"]
            data = description if isinstance(description, bytes) else description.encode("latin-1")
            site, at_base, semaphore = np.frombuffer(data[:24], "<u8").tolist()
            provider, name, arguments = data[24:].split(b"\0")[:3]
            assert (provider, at_base, semaphore) == (b"moescope", base["sh_addr"], 0)
            start = site - code["sh_addr"]
            assert code.data()[start : start + word] == nop
            found[name.decode()] = len(arguments.split())
    assert found == ARGUMENTS


@built
def test_a_probe_that_nobody_watches_costs_less_than_a_microsecond() -> None:
    experts, weights = np.zeros((1, 8), np.uint16), np.zeros((1, 8), np.float32)
    calls = [
        (probes.op_begin, (1, 2, 3, 1 << 48, probes.pack_sources(1, 2, 3))),
        (probes.graph, (max, 1, 2, 1, 4, 2, -1, 1, 8 << 32 | 1)),
        (probes.route, (1, 1, 8, experts, weights)),
    ]
    for call, arguments in calls:
        best = min(_time(call, arguments) for _ in range(5))
        assert best < 1000, call


def _time(call: object, arguments: tuple[object, ...], repeats: int = 20000) -> float:
    began = time.thread_time_ns()  # of this thread's own CPU time: whoever else runs meanwhile does not count
    for _ in range(repeats):
        call(*arguments)  # type: ignore[operator]
    return (time.thread_time_ns() - began) / repeats


@built
@pytest.mark.parametrize(
    ("probe", "arguments"),
    [
        ("token_begin", (1, 2, 3)),
        ("op_begin", (1, 2, 3, 4, [5])),
        ("graph", (max, 1, 2, "a", 1, 2, 3, 4, 5)),
        ("route", (0, 2, 2, b"12", b"1234")),
    ],
)
def test_wrong_arguments_raise_instead_of_reading_wild_memory(probe: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        getattr(probes, probe)(*arguments)


def test_the_engine_runs_without_the_extension_and_says_so_once(tmp_path: Path) -> None:
    folder = write_demo_model(tmp_path)
    script = "import sys; sys.modules['runtime.telemetry._probes'] = None\nfrom runtime import MoE\n"
    script += f"for _ in range(2): print([t.id for t in MoE.load({str(folder)!r}).generate('A cache', 3)])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("_probes.so") == 1
    assert len(set(done.stdout.splitlines())) == 1


@built
def test_what_the_probes_tell_is_what_the_log_tells(tmp_path: Path) -> None:
    if os.geteuid() or not shutil.which("bpftrace"):
        pytest.skip("needs root and bpftrace")
    folder, log = write_demo_model(tmp_path / "demo"), tmp_path / "log.json"
    generate = [sys.executable, "-m", "moescope", "generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", "5"]
    generate += ["--expert-cache", "2MiB", "--log", str(log)]
    seen = traced(SCRIPT.replace("LIB", str(LIBRARY)), generate)
    told = json.loads(log.read_text())
    facts, runs, routing = told["statistics"], told["expert_runs"], told["routing"]
    kinds = [kind.name.lower() for kind in probes.Kind]
    assert {kinds[int(k.split(",")[0])]: v for k, v in seen["@graphs"].items()} == {
        k: v["cpu"] for k, v in facts["graph_runs"].items()
    }
    assert {kinds[int(k)]: v for k, v in seen["@operators"].items()} == facts["operators"]
    assert seen["@ended"] == sum(facts["operators"].values())
    assert seen["@experts"] == {f"{r['layer']},{r['expert']}": r["runs"] for r in runs}
    assert (seen["@loads"], seen["@bytes"], seen["@evictions"]) == (
        facts["loads"]["demand"],
        facts["loaded_bytes"],
        facts["evictions"],
    )
    assert seen["@tokens"] == {str(step["seq"]): step["sampled"] for step in told["steps"]}
    assert seen["@first"] == sum(r["experts"][0][0] for r in routing)
    assert seen["@routed"] == {str(i): sum(np.size(r["experts"]) for r in routing if r["layer"] == i) for i in range(4)}


def traced(script: str, command: list[str]) -> dict[str, dict[str, int]]:
    """Run a command while bpftrace watches it, and no other process of the same library; its maps by name."""
    waiting = ["sh", "-c", 'read -r _; exec "$@"', "sh", *command]
    with subprocess.Popen(waiting, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as target:
        own = script.replace(" {", f" /pid == {target.pid}/ {{")
        tracer = subprocess.Popen(
            ["bpftrace", "-q", "-f", "json", "-e", 'BEGIN { printf("ready\\n"); } ' + own],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert tracer.stdout
            line = tracer.stdout.readline()
            while line and "ready" not in line:
                line = tracer.stdout.readline()
            if not line:
                target.kill()
                pytest.skip(f"bpftrace cannot run here: {tracer.communicate()[1][-200:]}")
            target.communicate("go\n", timeout=180)
            assert target.returncode == 0
            out = None
            while out is None:  # it may go to sleep just after it was told to end
                tracer.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out = tracer.communicate(timeout=10)[0]
        finally:
            tracer.kill()
    maps: dict[str, dict[str, int]] = {}
    for row in out.splitlines():
        record = json.loads(row) if row.startswith("{") else {}
        maps |= record["data"] if record.get("type") in ("map", "stats") else {}
    return maps
