"""Guests without Python: busybox, C libraries, engines, moescope-recorder and plans in an initial ramdisk, on other kernels.

    python -m tests.vm.bare [--arch ARCH] [--kernel SERIES] [--json FILE]

The plans are made here from the guest's files and from what its recorder said of its kernel; the recordings come back over the
console and are read here. Kernels are those of tests.vm.guest.py, and so is where they are kept.
"""

import argparse
import base64
import io
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analyzer.tables import store
from tests.test_llamacpp_truth import RENAMES_MEMORY, fused
from tests.vm.guest import GUESTS, MACHINES, NATIVE, ROOT, Guest, Unobtainable, make_kernel, pack, qemu, run
from tracer.errors import FAILED
from tracer.recording.checksums import check_file
from tracer.recording.paths import RECORDERS
from workloads import PROGRAMS
from workloads.gguf_model import write_moe
from workloads.llama_libraries import library_folder
from workloads.raw_records import RawRecording

CALLS, RELOADS = 300, 20
MEMORY_MIB = 1024
FIRST = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /tmp /out /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
echo 1 > /proc/sys/kernel/printk
cd /
/collect --probe-features > /out/features.json
{commands}
echo RECORDING
/bin/busybox tar -C /out -cf - . | /bin/busybox gzip | /bin/busybox base64
echo END
/bin/busybox sleep 3
echo 1 > /proc/sys/kernel/sysrq
echo o > /proc/sysrq-trigger
/bin/busybox sleep 100
"""
COLLECT = (
    "/collect --plan /{name}.json -o /out/{name} -- {command} > /out/{name}.said 2> /out/{name}.txt; echo $? > /out/{name}.status"
)
COMMANDS = {
    "sites": f"/bin/busybox sh -c '/bin/usdt_calls {CALLS}; true'",
    "named": f"/bin/reload /lib/libnamed.so {RELOADS} 3",
    "other": "/bin/usdt_calls 1",
}
"""Recording → command: our runtime's sites in a child; a library that comes and goes; with a plan for another build."""
PROMPT, NEW, PAUSE_MS = 20, 8, 200
LLAMA = f"/bin/llama_steps /llama/libllama.so /model.gguf {PROMPT} {NEW}"
TOLD = f"{LLAMA} 0 /out/told > /out/made 2> /dev/null"
COMPUTED = 16  # GGML_TENSOR_FLAG_COMPUTE
LEVELS_OF = {"llama": "token,graph,operator,expert", "all": "all"}
"""Recording of a real llama.cpp → its levels: as the first of a build, and with all that the first one taught."""
NAMED = '[[function]]\nlibrary = "libnamed.so"\nsymbol = "work_other"\nargs = { result = "s32 return" }\n'


def furnish(guest: Guest, place: Path) -> None:
    """What the guest holds besides its plans."""
    machine = MACHINES[guest.arch][3]
    compiler = "cc" if guest.arch == NATIVE else f"{machine}-linux-gnu-gcc"
    for folder in ("bin", "lib", "lib64"):
        (place / folder).mkdir(parents=True)
    loader = "ld-linux-aarch64.so.1" if machine == "aarch64" else "ld-linux-x86-64.so.2"
    for name in (loader, "libc.so.6", "libpthread.so.0", "libm.so.6", "libdl.so.2", "libstdc++.so.6", "libgcc_s.so.1"):
        found = Path(run(compiler, f"-print-file-name={name}").stdout.strip())
        for folder in ("lib", "lib64"):
            shutil.copy(found, place / folder / name)
    shutil.copy(busybox(guest), place / "bin" / "busybox")
    shutil.copy(RECORDERS / f"moescope-recorder-{machine}", place / "collect")
    programs, headers = ROOT / "workloads" / "programs", sysconfig.get_paths()["include"]
    sites = [
        "-O2",
        "-shared",
        "-fPIC",
        "-DPy_LIMITED_API=0x030B0000",
        f"-I{headers}",
        f"-I{ROOT}/runtime/telemetry",
        ROOT / "runtime" / "telemetry" / "_probes.c",
        *(ROOT / "runtime" / "experts" / name for name in ("_slots.c", "_foresight.c")),
        "-lm",
    ]
    run(compiler, *sites, "-o", place / "lib" / "_probes.so")
    links = [
        "-O2",
        "-pthread",
        "-rdynamic",
        f"-L{place}/lib",
        "-l:_probes.so",
        "-Wl,--allow-shlib-undefined,-z,lazy",
        "-Wl,-rpath,/lib",
    ]
    run(compiler, programs / "usdt_calls.c", "-o", place / "bin" / "usdt_calls", *links)
    run(compiler, "-O2", programs / "reload.c", "-o", place / "bin" / "reload")
    run(compiler, "-O2", "-shared", "-fPIC", "-fno-ipa-ra", programs / "named.c", "-o", place / "lib" / "libnamed.so")


def busybox(guest: Guest) -> Path:
    """A static busybox for the guest, by apt."""
    from tests.vm.guest import CACHE, CONFIG, apt_of, unpack

    place = CACHE / guest.arch / "busybox"
    if not place.exists():
        conf = apt_of(guest.arch, "apt-root", CONFIG["root_suites"])
        with tempfile.TemporaryDirectory() as folder:
            run("apt-get", "-c", conf, "download", "-qq", "busybox-static", cwd=folder)
            unpack(sorted(Path(folder).glob("*.deb")), place)
    return next(path for path in (place / "bin/busybox", place / "usr/bin/busybox") if path.exists())


def furnish_llama(guest: Guest, place: Path) -> None:
    """A real llama.cpp with its backends, a small model, and a program that takes steps."""
    shutil.copytree(library_folder("arm64" if guest.arch == "arm64" else "x64"), place / "llama")
    next((place / "llama").glob("libllama.v*.so")).rename(place / "llama" / "libllama.so")
    compiler = "cc" if guest.arch == NATIVE else f"{MACHINES[guest.arch][3]}-linux-gnu-gcc"
    run(compiler, "-O2", PROGRAMS / "llama_steps.c", "-ldl", "-o", place / "bin" / "llama_steps")
    write_moe(place / "model.gguf")


def write_plans(place: Path, features: dict[str, Any], work: Path) -> None:
    """Plan for each of COMMANDS, on this machine."""
    (work / "features.json").write_text(json.dumps(features))
    (work / "named.toml").write_text(NAMED)
    for name, words in {"sites": [], "named": ["--probes", str(work / "named.toml")]}.items():
        write_plan(place, work, name, place / "lib", *words, "--", "/bin/usdt_calls")
    plan = json.loads((place / "sites.json").read_text())
    for file in plan["files"]:
        file["id"] = "00" * 20
    (place / "other.json").write_text(json.dumps(plan))


def write_plan(place: Path, work: Path, name: str, folder: Path, *words: str) -> None:
    """One plan, for the libraries of a folder of the guest's."""
    levels = LEVELS_OF.get(name, LEVELS_OF["llama"])
    shared = ["--sysroot", place, "--features", work / "features.json", "--libraries", folder, "--levels", levels]
    run(sys.executable, "-m", "tracer", "plan", "-o", place / f"{name}.json", *shared, *words, cwd=ROOT)


def boot(guest: Guest, place: Path, names: list[str], out: Path, before: str = "", more: Sequence[str] = ()) -> None:
    """Boot the guest from its ramdisk; the recordings come to `out`. `before` runs first, `more` are words for QEMU."""
    commands = "\n".join(COLLECT.format(name=name, command=COMMANDS.get(name, f"{LLAMA} {PAUSE_MS}")) for name in names)
    (place / "init").write_text(FIRST.format(commands=f"{before}\n{commands}"))
    (place / "init").chmod(0o755)
    pack(place, out.parent / "initrd")
    words = qemu(guest, out.parent / "initrd", *more, memory_mib=MEMORY_MIB)
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    printed = done.stdout
    packed = re.search(r"RECORDING\s+([A-Za-z0-9+/=\s]+?)^END\s*$", printed, re.M)
    if not packed:
        raise SystemExit(f"{guest.name} sent nothing back:\n{printed[-3000:]}")
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed[1])), mode="r:gz") as archive:
        archive.extractall(out, filter="data")


def rows_of(out: Path) -> list[dict[str, Any]]:
    """What was seen: a row for each command."""
    status = {name: int((out / f"{name}.status").read_text()) for name in COMMANDS}
    rows = []
    for name, program, wanted in (("sites", "op_end", CALLS), ("named", "call_end", 3 * RELOADS)):
        if not (out / name / "manifest.json").exists():
            rows.append({"rung": name, "ok": False, "seen": (out / f"{name}.txt").read_text()[-500:]})
            continue
        kept = RawRecording(out / name)
        counts = {row["program"]: row["hits"] for row in kept.manifest["probes"] if row["engine"] != "kernel"}
        found, lost, machine = len(kept.records(program)), kept.manifest["lost"], kept.manifest["machine"]
        whole = kept.is_whole and all(not check_file(kept.path / f"{stream}.bin")[0] for stream in ("events", "details"))
        good = found == wanted and not lost and status[name] == 0 and whole and set(counts.values()) == {wanted}
        seen = (
            f"{found} of {wanted} {program}, hits {sorted(set(counts.values()))} at {len(counts)} places, lost {lost or 'none'}"
        )
        said = "; ".join(kept.manifest["warnings"])
        rows.append({"rung": name, "ok": good, "seen": f"{seen}; {machine['kernel']} {machine['arch']}; {said or 'no warnings'}"})
    told = (out / "other.txt").read_text().strip()
    rows.append({"rung": "other", "ok": status["other"] == FAILED and "the plan was made for" in told, "seen": told[-200:]})
    return rows


def row_of_llama(out: Path, name: str) -> dict[str, Any]:
    """Whether every step of a recorded llama.cpp has the operators that its evaluation callback told of in another run."""
    if not (out / name / "manifest.json").exists():
        return {"rung": name, "ok": False, "seen": (out / f"{name}.txt").read_text()[-500:]}
    kept = RawRecording(out / name)
    tables, wanted = store.build_tables(kept), operators_told(out / "told")
    found = {step: operators_traced(tables, step) for step in wanted}
    equal = [step for step in wanted if found[step] == fused(wanted[step])]
    tokens, same = tables["tokens"]["n_tokens"].tolist(), (out / f"{name}.said").read_text() == (out / "made").read_text()
    switches = len(tables["sched"]) if name == "all" else 1
    good = [len(equal) == NEW + 1, same, tokens == [PROMPT] + [1] * NEW, not kept.manifest["lost"], switches]
    seen = f"{len(equal)} of {NEW + 1} steps with the callback's {len(wanted[NEW])} operators, names and shapes; tokens {tokens}"
    more = f"{len(tables['routes'])} routes, {len(tables['sched'])} rows of sched, lost {kept.manifest['lost'] or 'none'}"
    files = sorted({Path(row["library"]).name for row in kept.manifest["probes"] if row["hits"] and row["engine"] == "llamacpp"})
    return {
        "rung": name,
        "ok": all(good),
        "seen": f"{seen}; {more}; {' '.join(files)}; {kept.manifest['warnings'] or 'no warnings'}",
    }


def operators_told(path: Path) -> dict[int, list[tuple[str, str, str]]]:
    """Step → (operator, name, dims) of what was computed, in llama.cpp's order."""
    found: dict[int, list[tuple[str, str, str]]] = {step: [] for step in range(NEW + 1)}
    for line in path.read_text().splitlines():
        step, operator, name, dims, flags = line.split("\t")
        if int(flags) & COMPUTED and "0" not in dims.split("x") and operator not in RENAMES_MEMORY:
            found[int(step)].append((operator, name, dims))
    return found


def operators_traced(tables: Mapping[str, pd.DataFrame], step: int) -> list[tuple[str, str, str]]:
    """The same from the table `operators`."""
    rows = tables["operators"].query("token_id == @step").sort_values("order")
    rows = rows[rows["shape"].str.count("x") == 3]  # dims of 0 are not written
    return list(zip(rows["type"], rows["name"], rows["shape"], strict=True))


def try_guest(guest: Guest) -> list[dict[str, Any]]:
    """Boot for the kernel's features, plan, boot to record, plan with what was learnt, boot to record; rows of results."""
    if not guest.kernel.exists():
        guest.kernel.parent.mkdir(parents=True, exist_ok=True)
        make_kernel(guest)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        place, out = work / "guest", work / "out"
        place.mkdir()
        out.mkdir()
        furnish(guest, place)
        furnish_llama(guest, place)
        boot(guest, place, [], out)
        features = json.loads((out / "features.json").read_text())
        write_plans(place, features, work)
        write_plan(place, work, "llama", place / "llama", "--", "/bin/llama_steps")
        boot(guest, place, [*COMMANDS, "llama"], out, TOLD)
        write_plan(place, work, "all", place / "llama", "--learn", str(out / "llama"), "--", "/bin/llama_steps")
        boot(guest, place, ["all"], out)
        rows = [{"rung": "features", "ok": features["uprobes"], "seen": json.dumps(features)}, *rows_of(out)]
        rows += [row_of_llama(out, name) for name in LEVELS_OF]
    took = round(time.monotonic() - began)
    return [{"guest": guest.name, "s": took, **row} for row in rows]


def main() -> int:
    """Try the guests that were chosen; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(MACHINES), help="only guests of this architecture")
    parser.add_argument("--kernel", metavar="SERIES", help="only guests with a kernel of this series: 6.1")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for guest in GUESTS:
        if args.arch in (None, guest.arch) and args.kernel in (None, guest.series):
            try:
                rows += try_guest(guest)
            except Unobtainable as error:
                print(f"== the guest {guest.name} was NOT run: {error}")
    for row in rows:
        print(f"{row['guest']:12} {row['s']:4} s  {row['rung']:10} {'passed' if row['ok'] else 'FAILED'}  {row['seen']}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(not rows or not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
