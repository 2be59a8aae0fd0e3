"""Inputs that others prepared for root: no hang, nothing disclosed, nothing touched outside the recording's folder.

Each row says what is prepared, what the tracer is called with, and how it must end. It runs through sudo of an ordinary user.
"""

import json
import os
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import RECORDER, ROOT, rest_long, trace
from tracer.errors import FAILED
from tracer.probes.elf import read_binary
from tracer.recording.format import Recording
from tracer.traced_program import models

pytestmark = pytest.mark.needs("probes")
USER = 65534
SUDO = {"SUDO_UID": str(USER), "SUDO_GID": str(USER), "SUDO_USER": "nobody"}
SECRET = "4711-only-root-may-know"
PATIENCE_S = 5.0
"""How much longer than usual a call may take."""
SPARSE, HUGE = 21 << 30, 20 << 30
RUN = (sys.executable, "-m", "tracer", "run", "--no-views", "-o", "{run}")
OPENS = 'dd if="$0" of=/dev/null bs=1 count=1 iflag=nonblock 2> /dev/null; true'
LIBRARY = "libllama.so"
SECTION = "<IIQQQQIIQQ"


@dataclass(frozen=True)
class Row:
    """An input: its name, what prepares it in a folder, what is called, its exit code, and a word of the answer.

    In `call`, {here}, {run}, {secret} and {library} are paths. `warns`: the manifest's warnings name the file.
    """

    name: str
    make: Callable[[Path, Path], object]
    call: tuple[str, ...]
    code: int = 0
    says: str = ""
    warns: bool = False
    before: str = ""
    """Shell commands before the call."""


def traced(*words: str, options: tuple[str, ...] = ("--levels", "token")) -> tuple[str, ...]:
    return (*RUN, *options, "--", *words)


def collected(*words: str) -> tuple[str, ...]:
    return (str(RECORDER), "-p", "{plan}", "-o", "{run}", "--", *words)


def nothing(here: Path, secret: Path) -> None:
    """Prepares nothing."""


def pipe(name: str) -> Callable[[Path, Path], None]:
    def make(here: Path, secret: Path) -> None:
        (here / name).parent.mkdir(exist_ok=True)
        os.mkfifo(here / name)

    return make


def link(name: str, target: str = "") -> Callable[[Path, Path], None]:
    """A link to a path, or to the secret."""

    def make(here: Path, secret: Path) -> None:
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).symlink_to(target or secret)

    return make


def sparse(name: str, content: bytes = b"") -> Callable[[Path, Path], None]:
    def make(here: Path, secret: Path) -> None:
        (here / name).write_bytes(content)
        os.truncate(here / name, SPARSE)

    return make


def holds(name: str, content: bytes) -> Callable[[Path, Path], None]:
    return lambda here, secret: (here / name).write_bytes(content)


def elf(sections: list[tuple[int, ...]], count: int = -1, segments: int = 0) -> bytes:
    """A shared library with nothing but a header and these section headers, of which it says to have `count`."""
    machine = {"x86_64": 62, "aarch64": 183}[os.uname().machine]
    rows = b"".join(struct.pack(SECTION, *row) for row in [(0,) * 10, *sections])
    there = len(sections) + 1 if count < 0 else count
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, machine, 1, 0, 64, 64, 0, 64, 56, segments, 64, there, 0)
    return head + rows


def gguf(tensors: int = 0, keys: int = 0, length: int = 0) -> bytes:
    """The head of a model file that lies about what follows."""
    return b"GGUF" + struct.pack("<IQQQ", 3, tensors, keys, length)


def section(kind: int, offset: int, size: int, link_to: int = 0) -> tuple[int, ...]:
    return (0, kind, 0, 0, offset, size, link_to, 0, 1, 24)


def secret_library(here: Path, secret: Path) -> None:
    """A link to a library that only root may read."""
    secret.write_bytes(Path("/bin/true").read_bytes() + SECRET.encode())
    (here / LIBRARY).symlink_to(secret)


SPECIAL = "not a regular file"


def with_file(option: str, name: str) -> tuple[str, ...]:
    return traced("true", options=(option, name))


def over(*words: str) -> tuple[str, ...]:
    """The same where the recorder is reached through a shell, and the planner is the user's own."""
    return (*RUN, "--on", "exec:sh -c", "--levels", "token", "--", *words)


def over_library(name: str, make: Callable[[Path, Path], None], warns: bool = False) -> Row:
    return Row(f"over a shell, {name}", make, over("sh", "-c", OPENS, "{library}"), warns=warns)


TAKES = traced("true", "{here}")
MODEL = traced("true", "{here}/m.gguf")
LOADS = traced("sh", "-c", OPENS, "{library}")
COLLECTS = collected("sh", "-c", OPENS, "{library}")
SYMBOLS, STRINGS, NOTES = 2, 3, 7
REPLACED = 'sleep 0.3; rm "$1"; ln -s "$2" "$1"; sleep 0.3'
ROWS = [
    Row("config.json is a FIFO", pipe("config.json"), TAKES),
    Row("config.json is /dev/zero", link("config.json", "/dev/zero"), TAKES),
    Row("config.json is the secret", link("config.json"), TAKES),
    Row("config.json is a folder", lambda here, _: (here / "config.json").mkdir(), TAKES),
    Row("config.json is sparse", sparse("config.json", b'{"a":'), TAKES),
    Row("config.json is nested too deeply", holds("config.json", b'{"a":' * 100_000), TAKES),
    Row("config.json is a kernel's endless file", link("config.json", "/proc/kmsg"), TAKES),
    Row("a package's manifest is a FIFO", pipe(".moescope-package/manifest.json"), TAKES),
    Row("the model is a FIFO", pipe("m.gguf"), MODEL),
    Row("the model is /dev/zero", link("m.gguf", "/dev/zero"), MODEL),
    Row("the model is the secret", link("m.gguf"), MODEL),
    Row("the model is a link to itself", link("m.gguf", "m.gguf"), MODEL),
    Row("the model is sparse", sparse("m.gguf"), MODEL),
    Row("the model claims 2^62 tensors", holds("m.gguf", gguf(tensors=1 << 62)), MODEL),
    Row("the model claims 2^62 keys and a name of 2^40 bytes", sparse("m.gguf", gguf(keys=1 << 62, length=1 << 40)), MODEL),
    Row("a folder's model is the secret", link("m.gguf"), TAKES),
    Row("the model becomes the secret", holds("m.gguf", b"x"), traced("sh", "-c", REPLACED, "sh", "{here}/m.gguf", "{secret}")),
    Row("--config is a FIFO", pipe("a.toml"), with_file("--config", "{here}/a.toml"), FAILED, "not a regular file"),
    Row("--config is /dev/zero", nothing, with_file("--config", "/dev/zero"), FAILED, SPECIAL),
    Row("--config is the secret", link("a.toml"), with_file("--config", "{here}/a.toml"), FAILED, "denied"),
    Row("--config is sparse", sparse("a.toml"), with_file("--config", "{here}/a.toml"), FAILED, "larger than"),
    Row("--probes is a FIFO", pipe("a.toml"), with_file("--probes", "{here}/a.toml"), FAILED, "not a regular file"),
    Row("--probes is the secret", link("a.toml"), with_file("--probes", "{here}/a.toml"), FAILED, "denied"),
    Row("--btf is a FIFO", pipe("b"), with_file("--btf", "{here}/b"), FAILED, SPECIAL),
    Row("--btf is sparse", sparse("b", elf([])), with_file("--btf", "{here}/b"), FAILED, "larger than"),
    Row("the library is a FIFO", pipe(LIBRARY), LOADS),
    Row("the library is /dev/zero", link(LIBRARY, "/dev/zero"), LOADS),
    Row("the library is empty, as one that is yet to be written", holds(LIBRARY, b""), LOADS),
    Row("the library is text", holds(LIBRARY, b"INPUT(libc.so)"), LOADS, warns=True),
    Row("the library is cut off", holds(LIBRARY, Path("/bin/sh").read_bytes()[:300]), LOADS, warns=True),
    Row("the library has 65,000 sections that it lacks", holds(LIBRARY, elf([], 65_000)), LOADS, warns=True),
    Row("the library has 60,000 segments that it lacks", holds(LIBRARY, elf([], segments=60_000)), LOADS, warns=True),
    Row("a section lies behind the end", holds(LIBRARY, elf([section(SYMBOLS, 1 << 62, 1 << 40)])), LOADS, warns=True),
    Row(
        "20 GB of symbols", sparse(LIBRARY, elf([section(SYMBOLS, 4096, 20 << 30, 2), section(STRINGS, 0, 1)])), LOADS, warns=True
    ),
    Row(
        "20 GB of strings",
        sparse(LIBRARY, elf([section(SYMBOLS, 4096, 240, 2), section(STRINGS, 0, HUGE)])),
        LOADS,
        warns=True,
    ),
    Row("3 MB of notes 900 times", sparse(LIBRARY, elf([section(NOTES, 1 << 20, 3 << 20)] * 900)), LOADS, warns=True),
    Row("a symbol table names itself as its strings", sparse(LIBRARY, elf([section(SYMBOLS, 4096, 96 << 20, 1)])), LOADS),
    Row("a library that only root may read", secret_library, LOADS),
    Row("64 descriptors", nothing, traced("true"), FAILED, "ulimit -n", before="ulimit -n 64"),
    Row("128 descriptors", nothing, traced("true"), FAILED, "ulimit -n", before="ulimit -n 128"),
    Row("no standard input", nothing, traced("true"), before="exec <&-"),
    Row("a memory limit", nothing, traced("true"), before="ulimit -v 200000"),
    Row("no locked memory", nothing, traced("true"), before="ulimit -l 0"),
    Row("-o is a FIFO", pipe("run"), traced("true"), FAILED, "cannot write"),
    Row("-o is the root", nothing, (*RUN[:-1], "/", "--", "true"), FAILED, "not empty"),
    Row("SUDO_UID is no number", nothing, ("env", "SUDO_UID=0x0", *traced("true")), FAILED, "SUDO_UID"),
    Row("the command is no program", holds("no", b""), traced("{here}/no"), FAILED, "cannot run"),
    Row("over a shell, config.json is a FIFO", pipe("config.json"), over("true", "{here}")),
    Row("over a shell, config.json is the secret", link("config.json"), over("true", "{here}")),
    Row("over a shell, the model is /dev/zero", link("m.gguf", "/dev/zero"), over("true", "{here}/m.gguf")),
    Row("over a shell, the model claims 2^62 tensors", holds("m.gguf", gguf(tensors=1 << 62)), over("true", "{here}/m.gguf")),
    over_library("the library is a FIFO", pipe(LIBRARY)),
    over_library("the library is /dev/zero", link(LIBRARY, "/dev/zero")),
    over_library("the library is text", holds(LIBRARY, b"INPUT(libc.so)"), warns=True),
    over_library("the library has 65,000 sections that it lacks", holds(LIBRARY, elf([], 65_000)), warns=True),
    over_library(
        "20 GB of symbols", sparse(LIBRARY, elf([section(SYMBOLS, 4096, 20 << 30, 2), section(STRINGS, 0, 1)])), warns=True
    ),
    over_library("a library that only root may read", secret_library),
    Row("over a shell, 64 descriptors", nothing, over("true"), FAILED, "ulimit -n", before="ulimit -n 64"),
    Row("over a shell, no standard input", nothing, over("true"), before="exec <&-"),
    Row("over a shell, -o is the root", nothing, (*RUN[:-1], "/", "--on", "exec:sh -c", "--", "true"), FAILED, "not empty"),
    Row("over a shell, the command is no program", holds("no", b""), over("{here}/no"), FAILED, "cannot run"),
    Row("the recorder's config.json is a FIFO", pipe("config.json"), collected("true", "{here}")),
    Row("the recorder's config.json is the secret", link("config.json"), collected("true", "{here}")),
    Row("the recorder's plan is a FIFO", pipe("plan"), collected("true"), FAILED, "plan"),
    Row("the recorder's plan is /dev/zero", link("plan", "/dev/zero"), collected("true"), FAILED, "plan"),
    Row("the recorder's plan is the secret", link("plan"), collected("true"), FAILED, "denied"),
    Row("the recorder's -o is the root", nothing, (*collected()[:3], "-o", "/", "--", "true"), FAILED, "not empty"),
    Row("the recorder has 64 descriptors", nothing, collected("true"), FAILED, "ulimit -n", before="ulimit -n 64"),
    Row(
        "the recorder's library lies",
        holds(LIBRARY, elf([], 65_000, 60_000)),
        COLLECTS,
    ),
    Row(
        "the recorder's library is sparse",
        sparse(LIBRARY, elf([])),
        COLLECTS,
        warns=True,
    ),
]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of the user's, below one that everyone may search."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        for own in ("here", "cache"):
            (Path(name) / own).mkdir()
            os.chown(Path(name) / own, USER, USER)
        yield Path(name)


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for the recorder."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    done = trace("plan", "-o", str(path), "--libraries", str(ROOT / "runtime" / "telemetry"), "--", "true")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def usual_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long a recording of nothing takes here and now."""
    began = time.monotonic()
    trace("run", "--no-views", "--levels", "token", "-o", str(tmp_path_factory.mktemp("usual") / "run"), "--", "true")
    return time.monotonic() - began


def snapshot(folder: Path) -> dict[str, tuple[int, ...]]:
    """What must not change of a folder's entries."""
    paths = [path for path in folder.rglob("*") if not {"run", "cache"} & {*path.relative_to(folder).parts}]
    return {str(path): (each.st_uid, each.st_mode, each.st_size, each.st_ino) for path in paths for each in [path.lstat()]}


OVER_SHELL = [row for row in ROWS if row.name.startswith("over a shell")]
SHORT = [*(row for row in ROWS if row not in OVER_SHELL)][::3] + OVER_SHELL[:1]
"""What `make test` tries: every kind of input, and every way to the recorder, is among them."""


@pytest.mark.parametrize("row", rest_long(ROWS, *SHORT), ids=[row.name for row in ROWS])
def test_a_hostile_input_neither_holds_nor_tells_nor_changes_anything(row: Row, shared: Path, plan: Path, usual_s: float) -> None:
    here, secret, run = shared / "here", shared / "secret", shared / "here" / "run"
    secret.write_text(json.dumps({"pin": SECRET}))
    row.make(here, secret)
    os.chmod(secret, 0o640)  # root's group may read it, too, and root is in that
    replaces = row.name == "the model becomes the secret"
    for path in here.rglob("*"):
        os.chown(path, USER, USER, follow_symlinks=False)
    fingerprint = models.model_rows([secret])[0]["fingerprint"]
    build_id = read_binary(str(secret)).build_id if row.make == secret_library else SECRET
    plan_path = here / "plan" if os.path.lexists(here / "plan") else Path(shutil.copy(plan, shared))
    paths = {"here": here, "run": run, "secret": secret, "library": here / LIBRARY, "plan": plan_path}
    words = [word.format(**paths) if "{" in word else word for word in row.call]
    script = f"{row.before or ':'}; exec {shlex.join(words)}"
    before, roots = snapshot(shared), set(os.listdir("/"))
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=ROOT,
        env={**os.environ, **SUDO, "MOESCOPE_CACHE": str(shared / "cache")},
        capture_output=True,
        text=True,
        timeout=8 * usual_s + PATIENCE_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == row.code, said
    assert row.says in said and "Traceback" not in said
    assert set(os.listdir("/")) == roots
    assert replaces or snapshot(shared) == before
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file()) if run.is_dir() else b""
    for hidden in (SECRET, fingerprint, build_id):
        assert hidden not in said and hidden.encode() not in written
    if row.code:
        assert not run.is_dir()
        return
    manifest = Recording(run).manifest
    assert manifest["state"] == "complete" and manifest["target"]["exit_code"] == 0
    assert any(str(here / LIBRARY) in warning for warning in manifest["warnings"]) or not row.warns
    assert {stat.S_IMODE(path.stat().st_mode) & 0o022 for path in run.rglob("*")} == {0}


def test_features_are_unknown_to_others_than_root_not_absent(tmp_path: Path) -> None:
    other = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    done = subprocess.run([*other, str(RECORDER), "--probe-features"], capture_output=True, text=True, check=False)
    assert done.returncode == FAILED and not done.stdout and "root" in done.stderr


def test_the_doctor_requires_what_run_requires_in_a_pid_namespace() -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "tracer", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert checks["process numbers"]["required"] and not checks["process numbers"]["ok"]
