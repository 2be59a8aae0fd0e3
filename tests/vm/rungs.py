"""What a guest climbs: each rung prints one line of JSON with what was seen. Times in an emulated guest mean nothing."""

import json
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

OUT = Path("/out")
ROOT = Path(__file__).resolve().parents[2]
CALLS = 300


def accepted(buffer: str) -> tuple[bool, str]:
    """Every program of an object is given to the kernel; what it refuses is named with the verifier's last lines."""
    from tracer.kernel.libbpf import BpfObject, Kernel
    from tracer.kernel.loaders import LibbpfLoader
    from tracer.recording.paths import BPF_OBJECTS

    kernel = Kernel()
    wanted = set(BpfObject(kernel, BPF_OBJECTS[buffer]).programs)
    loader = LibbpfLoader(kernel, wanted, {}, buffer)
    loader.close()
    for name, why in sorted(loader.refused.items()):
        print(f"refused {buffer} {name}: {why}", flush=True)
    return not loader.refused, f"{len(wanted) - len(loader.refused)} of {len(wanted)} accepted"


def features() -> tuple[bool, str]:
    """What this kernel offers, as the tracer finds it; the names are the table's in docs/kernels.md."""
    from tracer.kernel.btf import VMLINUX
    from tracer.kernel.features import has_ring_buffers
    from tracer.kernel.libbpf import Kernel
    from tracer.probes.fast_nop import has_fast_nop
    from tracer.probes.tracefs import has_tracepoint
    from tracer.probes.uprobes import has_multi_links, has_uprobes

    kernel = Kernel()
    seen = {
        "uprobes": has_uprobes(),
        "BTF in the kernel": VMLINUX.exists(),
        "BPF ring buffers": has_ring_buffers(kernel.lib),
        "`bpf_get_current_task_btf`": kernel.offered.task_btf,
        "cookies of probes": kernel.offered.cookies,
        "uprobe_multi links": has_multi_links(),
        "probed nop runs without a step": has_fast_nop(),
        "`syscalls:*`": has_tracepoint("syscalls", "sys_enter_openat"),
        "`filemap:mm_filemap_fault`": has_tracepoint("filemap", "mm_filemap_fault"),
    }
    return seen["uprobes"], json.dumps(seen)


def doctor() -> tuple[bool, str]:
    """Every check of the doctor ends with a line, and what is required is there."""
    done = command("-m", "tracer", "doctor", "--json")
    checks = json.loads(done.stdout)
    for check in checks:
        print("ok     " if check["ok"] else "lacking", check["name"], check["seen"][:300], flush=True)
    lacking = [check["name"] for check in checks if check["required"] and not check["ok"]]
    return not lacking, f"required and lacking: {', '.join(lacking) or 'nothing'}"


def steps() -> tuple[bool, str]:
    """A C program calls each of the runtime's sites so often; the tracer counts the same, in the kernel and in records."""
    from workloads.raw_records import RawRecording

    options = ["--no-views", "--engine", "moescope", "-o", str(OUT / "steps")]
    done = command("-m", "tracer", "run", *options, "--", "build/usdt_calls", str(CALLS))
    print(done.stderr[-2000:], flush=True)
    run = RawRecording(OUT / "steps")
    hits = Counter({row["program"]: row["hits"] for row in run.manifest["probes"] if row["engine"] == "moescope"})
    kinds = {"moescope_token_begin": "token_begin", "moescope_op_end": "op_end", "moescope_evict": "evict"}
    records = {program: len(run.records(kind)) for program, kind in kinds.items()}
    wrong = {program: count for program, count in (hits | records).items() if count != CALLS}
    return len(hits) == 12 and not wrong, f"{len(hits)} sites, {CALLS} calls each; differing: {wrong or 'none'}"


def tests(*arguments: str) -> tuple[bool, str]:
    """Tests of the project itself."""
    done = command("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    print(done.stdout[-6000:], flush=True)
    return done.returncode == 0, done.stdout.strip().splitlines()[-1]


def truth() -> tuple[bool, str]:
    """A library loaded late, a child, and arguments: tests/test_tracer_truth.py."""
    return tests("tests/test_tracer_truth.py", "-k", "every_call_is_recorded or late_and_a_child")


def llama() -> tuple[bool, str]:
    """A real llama.cpp: graphs, operators and routes as the engine's own callback has them."""
    return tests("tests/test_tracer_llamacpp.py", "-k", "not without_names and not one_thread")


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
    "truth": truth,
    "llama": llama,
    "sites": sites,
}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """One of our own modules."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)


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
    OUT.mkdir(exist_ok=True)
    print(f"guest {platform.release()} {platform.machine()} after {Path('/proc/uptime').read_text().split()[0]} s", flush=True)
    for rung in sys.argv[1:]:
        climb(rung)
