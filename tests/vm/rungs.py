"""What a guest climbs: each rung prints one line of JSON with what was seen. Times in an emulated guest mean nothing."""

import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

OUT = Path("/out")
ROOT = Path(__file__).resolve().parents[2]
CALLS, DEPTH, RELOADS, PATIENCE_S = 300, 40, 50, 1800
UNKNOWN, INTERRUPTED = 0, 2  # enum waker of bpf/records.h
CALLER = ["build/usdt_calls", str(CALLS)]
PRIORITY = 120  # of an ordinary thread, as the kernel counts
SIGNING = {0xD503233F: "paciasp", 0xD503245F: "bti c"}


def accepted(buffer: str) -> tuple[bool, str]:
    """Every program of an object is given to the kernel; what it refuses is named with the verifier's last line."""
    from tracer.kernel.trial import recorder_output

    trial = recorder_output("--buffer", buffer, "--try-programs")
    for name, why in sorted(trial["refused"].items()):
        print(f"refused {buffer} {name}: {why}", flush=True)
    return not trial["refused"], f"{trial['programs'] - len(trial['refused'])} of {trial['programs']} accepted"


def features() -> tuple[bool, str]:
    """What this kernel offers, as the recorder finds it; the names are the table's in docs/kernels.md."""
    from tracer.kernel import trial
    from tracer.probes.tracefs import has_tracepoint

    found = trial.features()
    names = {
        "uprobes": "uprobes",
        "btf": "BTF in the kernel",
        "ring_buffers": "BPF ring buffers",
        "task_btf": "`bpf_get_current_task_btf`",
        "cookies": "cookies of probes",
        "uprobe_multi": "uprobe_multi links",
        "fast_nop": "probed nop runs without a step",
        "syscall_tracepoints": "`syscalls:*`",
    }
    seen = {shown: found[name] for name, shown in names.items()}
    seen["`filemap:mm_filemap_fault`"] = has_tracepoint("filemap", "mm_filemap_fault")
    return seen["uprobes"], json.dumps(seen)


def doctor() -> tuple[bool, str]:
    """Every check of the doctor ends with a line, and what is required is there."""
    done = command("-m", "tracer", "doctor", "--json")
    checks = json.loads(done.stdout)["checks"]
    for check in checks:
        print("ok     " if check["ok"] else "lacking", check["name"], check["seen"][:300], flush=True)
    lacking = [check["name"] for check in checks if check["required"] and not check["ok"]]
    return not lacking, f"required and lacking: {', '.join(lacking) or 'nothing'}"


def steps() -> tuple[bool, str]:
    """A C program calls each of the runtime's sites so often; the tracer counts the same, in the kernel and in records."""
    options = ["--no-views", "--engine", "moescope", "-o", str(OUT / "steps")]
    done = command("-m", "tracer", "run", *options, "--", *CALLER)
    print(done.stderr[-2000:], flush=True)
    return all_calls(OUT / "steps")


def collected() -> tuple[bool, str]:
    """The same by a plan file, through rings and through perf buffers."""
    from tracer.recording.paths import RECORDERS

    plan, sites = str(OUT / "plan.json"), str(ROOT / "runtime" / "telemetry" / "_probes.so")
    command("-m", "tracer", "plan", "-o", plan, "--engine", "moescope", "--libraries", sites, "--", CALLER[0])
    seen = []
    for buffer in ("ring", "perf"):
        folder = OUT / f"collected-{buffer}"
        program = str(RECORDERS / f"moescope-recorder-{platform.machine()}")
        words = [program, "--plan", plan, "-o", str(folder), "--buffer", buffer, "--pmc", "page-faults=1:2", "--", *CALLER]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        print(done.stderr[-2000:], flush=True)
        ok, said = all_calls(folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        counted = manifest["records"].get("pmc", 0)
        seen.append((ok and manifest["buffer"] == buffer and counted > 0, f"{buffer}: {said}, {counted} readings of a counter"))
    return all(ok for ok, _ in seen), "; ".join(words for _, words in seen)


def all_calls(folder: Path) -> tuple[bool, str]:
    """Whether the kernel and the records of a recording of `CALLER` count every call."""
    from workloads.raw_records import RawRecording

    run = RawRecording(folder)
    hits = Counter({row["program"]: row["hits"] for row in run.manifest["probes"] if row["engine"] == "moescope"})
    kinds = {"moescope_token_begin": "token_begin", "moescope_op_end": "op_end", "moescope_evict": "evict"}
    records = {program: len(run.records(kind)) for program, kind in kinds.items()}
    wrong = {program: count for program, count in (hits | records).items() if count != CALLS}
    return len(hits) == 12 and not wrong, f"{len(hits)} sites, {CALLS} calls each; differing: {wrong or 'none'}"


def named_calls(folder: Path, library: str, functions: list[str], words: list[str]) -> tuple[Counter[str], str]:
    """(calls of named functions that began and ended, what the tracer warned of) in a traced command."""
    from workloads.raw_records import RawRecording

    declared = OUT / "named.toml"
    rows = (f'[[function]]\nlibrary = "{library}"\nsymbol = "{name}"\nargs = {{ result = "s32 return" }}\n' for name in functions)
    declared.write_text("".join(rows))
    options = ["--no-views", "--levels", "operator", "--probes", str(declared), "-o", str(folder)]
    done = command("-m", "tracer", "run", *options, "--", *words)
    print(done.stdout, done.stderr[-2000:], flush=True)
    run = RawRecording(folder)
    names = {row["probe"]: row["name"] for row in run.manifest["functions"]}
    begins, ends = (Counter(names[probe] for probe in run.records(kind)["probe"].tolist()) for kind in ("call_begin", "call_end"))
    return begins if begins == ends else begins - ends, done.stderr


def late() -> tuple[bool, str]:
    """A program loads a library with dlopen and drops it, again and again: every call is counted."""
    library = f"{ROOT}/build/libnamed.so"
    counts, _ = named_calls(OUT / "late", library, ["work_other"], ["build/reload", library, str(RELOADS), "3"])
    return counts == {"work_other": 3 * RELOADS}, f"{RELOADS} times loaded, {counts['work_other']} of {3 * RELOADS} calls"


def signed() -> tuple[bool, str]:
    """Functions that begin with bti or paciasp, and sign their return addresses, are probed at both ends and go on rightly."""
    from tracer.probes.elf import read_binary

    program, wanted = f"{ROOT}/build/named_signed", {"work": CALLS, "deep": DEPTH + 1, "work_other": 1}
    binary = read_binary(program)
    first = {name: int.from_bytes(binary.bytes_at(binary.symbol(name) or 0, 4), "little") for name in wanted}
    begins = {name: SIGNING.get(code, hex(code)) for name, code in first.items()}
    counts, _ = named_calls(OUT / "signed", program, list(wanted), [program, str(CALLS), str(DEPTH)])
    return counts == wanted and "paciasp" in begins.values(), f"{begins}; calls {dict(counts)} of {wanted}"


def runtime() -> tuple[bool, str]:
    """Our own runtime on the CPU with the demo model: the steps recorded are those of its own log."""
    from workloads.raw_records import RawRecording

    model, log = OUT / "demo", OUT / "runtime.json"
    generate = ["-m", "moescope", "generate", str(model), "--prompt", "a b c", "--max-new-tokens", "4", "--log", str(log)]
    options = ["--no-views", "--levels", "token,graph,operator,expert", "-o", str(OUT / "runtime")]
    for words in (
        ["-m", "moescope", "convert", "demo", str(model)],
        ["-m", "tracer", "run", *options, "--", sys.executable, *generate],
    ):
        done = command(*words)
        print(done.stdout[-1000:], done.stderr[-2000:], flush=True)
    made = [step["sampled"] for step in json.loads(log.read_text())["steps"]]
    run = RawRecording(OUT / "runtime")
    seen, experts = run.records("token_end")["result"].tolist(), len(run.records("expert_end"))
    return seen == made and experts > 0, f"{len(seen)} of {len(made)} steps with the same tokens, {experts} runs of experts"


def lockdown() -> tuple[bool, str]:
    """With the kernel locked down, the last rung of a guest: the doctor and the tracer say so, and name nothing else."""
    from tracer.errors import FAILED

    subprocess.run(["mount", "-t", "securityfs", "none", "/sys/kernel/security"], check=False)
    Path("/sys/kernel/security/lockdown").write_text("confidentiality")
    checks = {check["name"]: check for check in json.loads(command("-m", "tracer", "doctor", "--json").stdout)["checks"]}
    told = checks["BPF is allowed"]["seen"]
    done = command("-m", "tracer", "run", "-o", str(OUT / "locked"), "--", "true")
    print(told, checks["tracefs"], done.stderr, flush=True)
    return "locked down" in told and done.returncode == FAILED and "locked down" in done.stderr, done.stderr.strip()[-200:]


SLEEPER = """
import os, time
os.sched_setaffinity(0, {0})
child = os.fork()
while not child:
    pass
for _ in range(100):
    time.sleep(0.002)
os.kill(child, 9)
"""


def interrupted() -> tuple[Counter[int], bool]:
    """(what a child that always computes was doing where its CPU's timer woke its maker, whether this kernel tells that)."""
    from tracer.kernel import trial
    from workloads.raw_records import RawRecording

    options = ("--no-views", "--levels", "sched", "-o", str(OUT / "sleeper"))
    command("-m", "tracer", "run", *options, "--", sys.executable, "-c", SLEEPER)
    run = RawRecording(OUT / "sleeper")
    wakings, own = run.records("sched_waking"), run.manifest["target"]["pid"]
    children = {row["tid"] for row in run.manifest["threads"]} - {own}
    met = [row["waker"] for row in wakings if row["woken_tid"] == own and row["tid"] in children]
    return Counter(map(int, met)), trial.features()["cookies"]  # bpf_task_pt_regs is of the same Linux 5.15


def answers() -> tuple[bool, str]:
    """A program reads a disk past the page cache: every request has its answer, and every waking a name, a priority and a CPU.

    Where the kernel tells what the thread did that a waking met, that of an interrupt is one: it was in no system call.
    """
    from workloads.raw_records import RawRecording

    reads = [sys.executable, "workloads/programs/direct_reads.py", "/dev/vda", str(CALLS)]
    done = command("-m", "tracer", "run", "--no-views", "--levels", "io,sched", "-o", str(OUT / "answers"), "--", *reads)
    print(done.stderr[-2000:], flush=True)
    run = RawRecording(OUT / "answers")
    asked, answered = (Counter(run.records(kind)[["dev", "sector"]].tolist()) for kind in ("block_issue", "block_done"))
    wakings = run.records("sched_waking")
    own = wakings[wakings["woken_tid"] == run.manifest["target"]["pid"]]
    cpus, priorities, names = (set(own[name].tolist()) for name in ("target_cpu", "prio", "comm"))
    errors = int((run.records("block_done")["error"] != 0).sum())
    ok = asked == answered and asked.total() >= CALLS and not errors
    ok &= len(own) > 0 and cpus <= set(range(os.cpu_count() or 1)) and priorities == {PRIORITY}
    ok &= any(name.startswith(b"python") for name in names)
    ok &= all(name.startswith((b"python", b"moescope")) for name in names)  # the recorder's until the target's execve
    met, tells = interrupted()
    ok &= met[INTERRUPTED if tells else UNKNOWN] > met.total() / 2
    seen = f"{answered.total()} of {asked.total()} requests answered, {errors} errors; interrupts met {dict(met)}; "
    seen += f"{len(own)} wakings"
    return ok, f"{seen} of {names} on CPUs {cpus}, priorities {priorities}"


def tests(*arguments: str) -> tuple[bool, str]:
    """Tests of the project itself; what they recorded comes to the host."""
    kept = f"--basetemp={OUT / Path(arguments[0]).stem}"
    done = command("-m", "pytest", "-q", "-p", "no:cacheprovider", kept, *arguments)
    print(done.stdout[-6000:], done.stderr[-3000:], flush=True)
    return done.returncode == 0, (done.stdout.strip() or f"pytest ended with {done.returncode}").splitlines()[-1]


def truth() -> tuple[bool, str]:
    """A library loaded late, a child, and arguments: tests/test_tracer_truth.py."""
    return tests("tests/test_tracer_truth.py", "-k", "every_call_is_recorded or late_and_a_child")


def llama() -> tuple[bool, str]:
    """A real llama.cpp: graphs, operators and routes as the engine's own callback has them."""
    return tests("tests/test_tracer_llamacpp.py", "-k", "not without_names and not one_thread")


def stacks() -> tuple[bool, str]:
    """A tree of calls and waits that logs itself: its samples and waits, unwound here without frame pointers."""
    os.environ["EMULATED"] = "1"
    return tests("tests/test_stacks.py", "-k", "none and (each_branch or recursion or whole_stacks or who_waits)")


def recorders() -> tuple[bool, str]:
    """The recorder by a plan and with its planner on the same seeded run: equal tables; what a full ring loses is counted."""
    return tests("tests/test_recorder.py", "-k", "seeded_run or childs_library or full_ring")


def sites() -> tuple[bool, str]:
    """What this kernel does with arm64 instructions under a probe, beside their class in tracer/probes/placement.py."""
    done = command("-m", "tests.vm.arm64_sites", "build/arm64_sites.so")
    print(done.stdout, done.stderr[-1000:], flush=True)
    return done.returncode == 0, done.stdout.strip().splitlines()[-1] if done.stdout else "no answer"


RUNGS: dict[str, Callable[[], tuple[bool, str]]] = {
    "features": features,
    "programs": lambda: accepted("ring"),
    "perf": lambda: accepted("perf"),
    "doctor": doctor,
    "steps": steps,
    "collected": collected,
    "truth": truth,
    "llama": llama,
    "recorders": recorders,
    "stacks": stacks,
    "sites": sites,
    "late": late,
    "answers": answers,
    "signed": signed,
    "runtime": runtime,
    "lockdown": lockdown,
}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """One of our own modules."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def climb(name: str) -> None:
    """One rung, and its line."""
    began = time.monotonic()
    try:
        ok, seen = RUNGS[name]()
    except Exception as error:  # of whatever sort: the next rung is climbed all the same
        ok, seen = False, f"{type(error).__name__}: {error}"[:300]
    row = {"rung": name, "ok": ok, "seen": seen, "kernel": platform.release(), "s": round(time.monotonic() - began)}
    print(f"\nRUNG {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    if platform.machine() == "x86_64":
        # QEMU's `vpmaskmov` reads masked lanes, too (7.2, and its sources until today). numpy's AVX2 sorts mask what lies
        # behind an array, up to 1,016 bytes: they end with SIGSEGV where a mapping ends with an array.
        os.environ["NPY_DISABLE_CPU_FEATURES"] = "X86_V3"
    OUT.mkdir(exist_ok=True)
    print(f"guest {platform.release()} {platform.machine()} after {Path('/proc/uptime').read_text().split()[0]} s", flush=True)
    for rung in sys.argv[1:]:
        climb(rung)
