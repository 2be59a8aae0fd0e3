"""Damaged input of every kind for the command lines, with the outcomes that count as faults.

A kind of input is a folder with intact files, the verbs that read it, and whether its format has checksums. A case damages one
file, runs one verb in this process, and classifies the answer: a traceback, a hang and an undocumented exit code are faults,
and so is a different answer without a warning if checksums would have shown the damage.
"""

import contextlib
import io
import json
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from moescope import command_line, plain
from moescope.__main__ import main

MOST_S = 10
TOKENS = (
    b"",
    b"\0",
    b'"',
    b",",
    b"\n",
    b"[",
    b"{}",
    b"null",
    b"-1",
    b"NaN",
    b"1e999",
    b"9" * 60,
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xe2\x80\xae",
)
VALUES: tuple[Any, ...] = (None, [], {}, "", "x\n\x1b[2J", -1, 0, 1 << 70, 1e308, True, [[]], [None], {"a": 1}, "9" * 60)
LAST_RESORT = "it is damaged, or not from MoEScope ("
FAULTS = ("traceback", "hang", "exit code", "silent change")


@dataclass(frozen=True)
class Kind:
    """A kind of input: the function that makes it in a folder, the files to damage, and the verbs, with words, that read it.

    checked: its format has checksums; refused: verbs that read even intact files and then reject them.
    """

    make: Callable[[Path], object]
    damaged: str
    verbs: tuple[str, ...]
    checked: bool = False
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A verb's answer: its way of ending and its output."""

    ending: str
    code: int
    out: str
    err: str
    where: str = ""


@dataclass
class Bench:
    """A kind set up in a separate folder, and the answers for the intact input."""

    kind: Kind
    folder: Path
    sound: dict[str, bytes] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kind.make(self.folder)
        self.sound = {str(path.relative_to(self.folder)): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        self.names = sorted(str(path.relative_to(self.folder)) for path in self.folder.glob(self.kind.damaged) if path.is_file())
        for verb in self.kind.verbs:
            self.answers[verb] = sound = run_verb(verb, self.folder)
            assert not sound.ending and (sound.code == 2) == (verb in self.kind.refused), f"{verb}: {sound.where} {sound.err}"
            self.restore()

    def restore(self) -> None:
        """Restore the folder."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            name = str(path.relative_to(self.folder))
            if path.is_file() and name not in self.sound:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        for name, content in self.sound.items():
            path = self.folder / name
            if not path.exists() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def judge(self, verb: str, name: str, content: bytes) -> tuple[str, Answer]:
        """The outcome for damaged content of a file: one of FAULTS or `same`, `different`, `warned`, `refused`, `last resort`."""
        (self.folder / name).write_bytes(content)
        try:
            answer = run_verb(verb, self.folder)
        finally:
            self.restore()
        if answer.ending:
            return answer.ending, answer
        if answer.code not in (0, 1, 2):
            return "exit code", answer
        if LAST_RESORT in answer.err:
            return "last resort", answer
        if answer.code == 2:
            return "refused", answer
        if answer.err != self.answers[verb].err:
            return "warned", answer
        same = answer.out == self.answers[verb].out
        return "same" if same else "silent change" if self.kind.checked else "different", answer


class Hang(BaseException):
    """A verb took more than MOST_S of CPU time, or ten times as long in wall time."""


def too_long(*_: object) -> None:
    """Signal handler for SIGALRM and SIGPROF."""
    raise Hang


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raise Hang after MOST_S."""
    limits = {signal.SIGPROF: (signal.ITIMER_PROF, MOST_S), signal.SIGALRM: (signal.ITIMER_REAL, 10 * MOST_S)}
    before = {number: signal.signal(number, too_long) for number in limits}
    for timer, seconds in limits.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in limits.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def run_verb(verb: str, folder: Path) -> Answer:
    """Run `verb words`, with {} replaced by the folder; after `;` another one, unless the one before was refused."""
    verbs = [part.split() for part in verb.replace("{}", str(folder)).split(";")]
    out, err = io.StringIO(), io.StringIO()
    plain.warn.cache_clear()
    plain.doubts.clear()
    command_line.interrupts.clear()
    ending, code, where = "", 0, ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with time_limit():
                for words in verbs:
                    code = main(words)
                    if code not in (0, 1):
                        break
        except Hang:
            ending = "hang"
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            ending = "traceback"
            last = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in last if "site-packages" not in frame.filename]
            place = (own or last)[-1]
            where = f"{type(error).__name__} {Path(place.filename).name}:{place.lineno} {place.name}"
    return Answer(ending, code, out.getvalue(), err.getvalue(), where)


def damage(rng: Random, content: bytes, name: str) -> bytes:
    """Damaged content: bits flipped, pieces cut, removed, doubled or inserted; JSON values replaced, keys deleted."""
    for _ in range(rng.randint(1, 3)):
        how = rng.choice(["bit", "cut", "remove", "double", "insert", "replace", *["json"] * (3 * name.endswith(".json"))])
        at = rng.randint(0, max(len(content) - 1, 0))
        end = min(len(content), at + rng.choice([1, 2, 7, 64, 300]))
        if how == "bit" and content:
            content = content[:at] + bytes([content[at] ^ 1 << rng.randint(0, 7)]) + content[at + 1 :]
        elif how == "json":
            content = of_json(rng, content)
        else:
            token = rng.choice(TOKENS)
            pieces = {"cut": (at, len(content), b""), "remove": (at, end, b""), "double": (at, at, content[at:end])}
            begin, stop, new = pieces.get(how, (at, at if how == "insert" else end, token))
            content = content[:begin] + new + content[stop:]
    return content


def of_json(rng: Random, content: bytes) -> bytes:
    """A JSON document with one value replaced, or one key deleted."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return content
    holder: Any = document
    while isinstance(holder, dict | list) and holder:
        key = rng.choice(sorted(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        if isinstance(holder[key], dict | list) and holder[key] and rng.randint(0, 3):
            holder = holder[key]
            continue
        if rng.random() < 0.5:
            holder[key] = rng.choice(VALUES)
        else:
            del holder[key]
        break
    return json.dumps(document).encode()


READING = [
    "summary",
    "time",
    "findings",
    "time threads",
    "trends",
    "experts",
    "npu",
    "predict steps",
    "roofline",
    "query",
    "write",
]
OF_A_RECORDING = (*(f"{verb} {{}}" for verb in READING), "write {} --format json --out -")


def make_recording(folder: Path) -> None:
    """A recording with checksums."""
    from workloads.recordings import runtime

    runtime(3).write_sealed(folder)


def old_recording(folder: Path) -> None:
    """A recording without checksums."""
    from workloads.recordings import make_manifest, runtime

    runtime(3).write(folder)
    (folder / "manifest.json").write_text(json.dumps(make_manifest()))


def kept_tables(folder: Path) -> None:
    """A recording with all cached files beside it."""
    make_recording(folder)
    run_verb("summary {}", folder)
    run_verb("query {}", folder)


def copy_files(*names: str) -> Callable[[Path], None]:
    """A function that copies files of the tests' data."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        for name in names:
            shutil.copy(Path(__file__).resolve().parents[1] / "tests" / "data" / name, folder)

    return make


def make_profiles(folder: Path) -> None:
    """Profiles that become recordings, and a series of executions."""
    from workloads.drawn_series import MS, draw_series, onnxruntime_profile, qnn_profile

    copy_files("etdump/cpu.etdp", "hexagon/profile.log")(folder)
    ms = draw_series(1).ms[200:250]
    (folder / "profile.json").write_text(onnxruntime_profile(ms))
    (folder / "series.csv").write_text(qnn_profile(np.append(80 * MS, ms)))


def make_sides(folder: Path) -> None:
    """Two sides of two recordings each, and what `compare --save` keeps of two others."""
    from workloads.recordings import runtime

    for i, run in enumerate(("base/1", "base/2", "cand/1", "cand/2", "old/1", "new/1")):
        runtime(3 + i).write_sealed(folder / run, started_utc=f"2026-01-01T00:00:0{i}Z")
    run_verb("compare {}/old {}/new --save {}/kept", folder)
    for side in ("old", "new"):
        shutil.rmtree(folder / side)


def make_model(folder: Path) -> None:
    """The demo model, small, as a checkpoint and as a package."""
    from runtime.package.convert import convert
    from runtime.package.demo_model import DemoSizes, write_demo_model

    write_demo_model(folder / "model", sizes=DemoSizes(hidden=64, layers=2))
    convert(folder / "model", folder / "package")


def make_gguf(folder: Path) -> None:
    """A model for llama.cpp."""
    from workloads.gguf_model import write_moe

    folder.mkdir(parents=True)
    write_moe(folder / "model.gguf", layers=1)


def make_toml(folder: Path) -> None:
    """A device, options of the tracer, and functions to probe."""
    from analyzer.predict.devices import HERE

    copy_files("infersim/hf_configs/qwen3-8B_config.json")(folder)
    shutil.copy(HERE / "h20.toml", folder / "device.toml")
    function = '[[function]]\nlibrary = "executable"\nsymbol = "main"\nargs = { n = "s32 @1", name = "str *(@2)" }\n'
    (folder / "functions.toml").write_text(function)


def make_routes(folder: Path) -> None:
    """A prompt and nine tokens of a small model in every format of routes, and the times of its steps."""
    from analyzer.imports.routes import FORMATS, read_routes, write_routes

    folder.mkdir(parents=True)
    random, rows = Random(1), []
    for step in range(12):
        for layer in (1, 3):
            for slot, expert in enumerate(random.sample(range(8), 2)):
                rows.append(f"0,{int(step > 2)},{step},{layer},{slot},{expert},0.5,{step % 3},{640 * (step % 3 == 0)}")
    head = "# route_trace v1\n# layer=1 expert_bytes=640 dense_bytes=0\n# layer=3 expert_bytes=320 dense_bytes=0\n"
    columns = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
    (folder / "route-trace.csv").write_text(head + columns + "\n".join(rows) + "\n")
    tables = read_routes(folder / "route-trace.csv")
    for name in FORMATS:
        if name != "route-trace":
            write_routes(tables, folder / f"{name}.csv", name)
    steps = "".join(f"{3 + i % 3},2,{i % 3},0,{320 * (i % 3)}\n" for i in range(9))
    (folder / "steps.metrics").write_text(
        "wall_ms,compute_ms,stall_ms,mgmt_ms,read_bytes\n" + steps + "# summary prefill_s=0.1\n"
    )


OF_ROUTES = (
    *(f"experts {{}}/{name}.csv --curves" for name in ("counts", "layer-expert", "routed-experts", "router-trace")),
    "simulate {}/route-trace.csv --measured {}/steps.metrics --cache 50%,100% --json",
)
OF_PROFILES = (
    "import {}/cpu.etdp --out {}/made; summary {}/made",
    "import {}/profile.log --out {}/made; npu {}/made",
    "import {}/profile.json --out {}/made; trends {}/made --json; summary {}/made",
    "trends {}/series.csv",
    "trends {}/series.csv --json",
)
OF_SIDES = (
    "compare {}/base {}/cand",
    "compare {}/base {}/cand --json",
    "compare {}/base/1 {}/cand/1 --graphs",
    "compare {}/kept/base {}/kept/cand",
    "compare {}/kept/base {}/base :: {}/cand",
)
OF_GGUF = ("inspect {}/model.gguf", "predict --device h20 --phase decode --config {}/model.gguf")
"""A weight file given where a folder or a JSON file is expected."""
OF_FUNCTIONS = "tracer probes --probes {}/functions.toml --levels none /bin/true"
"""Rejected for its level, which is checked after the file is read and before a probe is placed."""
KINDS = {
    "recording": Kind(make_recording, "*", OF_A_RECORDING, checked=True),
    "recording without checksums": Kind(old_recording, "*", OF_A_RECORDING),
    "Parquet tables": Kind(kept_tables, "tables/*", OF_A_RECORDING, checked=True),
    "QNN CSV": Kind(
        copy_files("qnn/onnxruntime.csv", "qnn/viewer.csv", "qnn/linting.csv", "qnn/viewer.txt"),
        "*",
        ("import {}/onnxruntime.csv {}/viewer.csv {}/linting.csv {}/viewer.txt",),
    ),
    "optrace": Kind(copy_files("qnn/optrace.json", "qnn/qhas.json"), "*", ("import {}/optrace.json {}/qhas.json --json",)),
    "package": Kind(make_model, "*/*.json", ("inspect {}/model", "inspect {}/package --json")),
    "profiles": Kind(make_profiles, "*", OF_PROFILES),
    "comparison": Kind(make_sides, "[bck]*/*/*", OF_SIDES),
    "GGUF": Kind(make_gguf, "*", OF_GGUF, refused=OF_GGUF),
    "routes": Kind(make_routes, "*", OF_ROUTES),
    "TOML": Kind(
        make_toml,
        "*",
        (
            "predict --phase decode --device {}/device.toml --config {}/qwen3-8B_config.json",
            OF_FUNCTIONS,
        ),
        refused=(OF_FUNCTIONS,),
    ),
}
