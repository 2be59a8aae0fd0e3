"""Root writes with the rights of the user who typed sudo, and only where nothing of others lies."""

import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, trace
from tracer.errors import FAILED
from tracer.recording.paths import Owner

pytestmark = pytest.mark.needs("probes")
USER, OTHER = 65534, 12345
SUDO = {"SUDO_UID": str(USER), "SUDO_GID": str(USER), "SUDO_USER": "nobody"}
NOBODY = Owner(USER, USER, "nobody", "/")


def record(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A short recording into `folder`."""
    return trace("run", "--no-views", "--levels", "token", "-o", str(folder), "--", "true", env=environment)


def seen(path: Path) -> tuple[int, ...]:
    """What must not change of a file."""
    status = path.lstat()
    return status.st_uid, status.st_gid, status.st_mode, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_nlink


def furnished(folder: Path) -> Path:
    """A folder of another user's, with files, links and a setuid program; the user may write to it."""
    (folder / "inner").mkdir(parents=True)
    (folder / "text").write_text("theirs")
    (folder / "inner" / "secret").write_text("theirs, too")
    (folder / "program").write_bytes(b"#!/bin/sh\n")
    (folder / "link").symlink_to(folder / "text")
    os.link(folder / "text", folder / "hard")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, OTHER, OTHER, follow_symlinks=False)
    os.chmod(folder / "program", stat.S_ISUID | 0o755)
    os.chmod(folder, 0o777)
    return folder


@pytest.mark.parametrize("environment", [SUDO, {}], ids=["through sudo", "as root"])
def test_a_folder_that_holds_files_is_refused_and_nothing_of_it_changes(open_folder: Path, environment: dict[str, str]) -> None:
    folder = furnished(open_folder / "theirs")
    before = {path: seen(path) for path in (folder, *folder.rglob("*"))}
    done = record(folder, **environment)
    assert done.returncode == FAILED
    assert done.stderr.count("\n") == 1 and "hard)" in done.stderr
    assert {path: seen(path) for path in (folder, *folder.rglob("*"))} == before


def test_a_folder_where_the_user_may_not_write_is_refused_though_root_may(open_folder: Path) -> None:
    (open_folder / "roots").mkdir(mode=0o755)
    before = seen(open_folder / "roots")
    for folder in (open_folder / "roots", open_folder / "roots" / "inner"):
        done = record(folder, **SUDO)
        assert done.returncode == FAILED and f" {folder}: Permission denied" in done.stderr
    assert seen(open_folder / "roots") == before


def test_a_link_to_where_the_user_may_not_write_leads_nowhere(open_folder: Path) -> None:
    (open_folder / "roots").mkdir(mode=0o755)
    (open_folder / "link").symlink_to(open_folder / "roots")
    done = record(open_folder / "link", **SUDO)
    assert done.returncode == FAILED and "Permission denied" in done.stderr
    assert not list((open_folder / "roots").iterdir())


def test_all_that_a_recording_makes_is_the_users(open_folder: Path) -> None:
    assert record(open_folder / "a" / "run", **SUDO).returncode == 0
    made = [open_folder / "a", *(open_folder / "a").rglob("*")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(USER, USER)}
    assert {"manifest.json", "events.bin", "details.bin"} <= {path.name for path in made}


def test_roots_rights_are_back_afterwards_even_after_an_error(open_folder: Path) -> None:
    secret = open_folder / "secret"
    secret.write_text("root's")
    os.chmod(secret, 0o600)
    with pytest.raises(PermissionError), NOBODY.acting():
        secret.read_text()
    assert secret.read_text() == "root's"
    (open_folder / "new").touch()
    assert (open_folder / "new").stat().st_uid == 0


PLANTED = """
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
const char *ggml_op_name(int op) { return op ? "" : "NONE"; }
void llama_decode(void) {}
__attribute__((constructor)) static void runs(void)
{
	char path[4096];
	snprintf(path, sizeof(path), FOLDER "/run-by-%d", (int)getuid());
	close(open(path, O_CREAT | O_WRONLY, 0666));
}
"""


def test_no_code_of_a_library_that_another_users_program_has_is_run(open_folder: Path) -> None:
    (open_folder / "planted.c").write_text(PLANTED)
    library, output = open_folder / "libllama.so", open_folder / "recording"
    flags = ["-O2", "-shared", "-fPIC", f'-DFOLDER="{open_folder}"']
    subprocess.run(["cc", *flags, "-o", library, open_folder / "planted.c"], check=True)
    command = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "sleep", "600"]
    with subprocess.Popen(command, env={**os.environ, "LD_PRELOAD": str(library)}) as target:
        while not list(open_folder.glob(f"run-by-{USER}")):
            assert target.poll() is None
        (open_folder / "run-by-0").unlink(missing_ok=True)  # setpriv's own
        options = ("--no-views", "--duration", "0.5", "--pid", str(target.pid), "-o", str(output))
        done = trace("attach", *options)
        target.kill()
    assert done.returncode == 0, done.stderr
    assert str(library) in (output / "manifest.json").read_text()
    assert [path.name for path in open_folder.glob("run-by-*")] == [f"run-by-{USER}"]


NEVER = (12, 16, 17, 27)
"""CAP_NET_ADMIN, CAP_SYS_MODULE, CAP_SYS_RAWIO, CAP_MKNOD."""


@pytest.mark.parametrize("environment", [SUDO, {}], ids=["through sudo", "as root"])
def test_while_it_records_the_recorder_has_few_of_roots_capabilities_in_effect(
    open_folder: Path, environment: dict[str, str]
) -> None:
    reads = ["/usr/bin/env", "sh", "-c", "sleep 0.3; grep -h -E '^(Name|CapEff)' /proc/$PPID/status"]
    done = trace("run", "--no-views", "--levels", "token", "-o", str(open_folder / "run"), "--", *reads, env=environment)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(":\t") for line in done.stdout.splitlines() if line.startswith(("Name", "CapEff")))
    held = int(told["CapEff"], 16)
    assert told["Name"].startswith("moescope-record") and held >> 21 & 1  # CAP_SYS_ADMIN
    assert [number for number in NEVER if held >> number & 1] == []


def test_a_plan_is_written_with_the_users_rights(open_folder: Path) -> None:
    with tempfile.TemporaryDirectory() as private:
        (Path(private) / "roots").write_text("roots")
        (open_folder / "plan.json").symlink_to(Path(private) / "roots")
        os.chmod(private, 0o755)
        options = ("--engine", "moescope", "--libraries", str(ROOT / "runtime" / "telemetry"))
        done = trace("plan", *options, "-o", str(open_folder / "plan.json"), "--", "true", env=SUDO)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Permission denied" in done.stderr
        assert (Path(private) / "roots").read_text() == "roots"
        assert trace("plan", *options, "-o", str(open_folder / "own.json"), "--", "true", env=SUDO).returncode == 0
        assert (open_folder / "own.json").stat().st_uid == USER
