"""The doctor tells why something is missing: not in the kernel, not mounted, or forbidden; and what a file can stand in for."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, lacking
from tracer.commands.doctor import check_hexagon, engines_on_npus
from tracer.errors import FAILED
from tracer.kernel.features import VMLINUX

WHY = "from tracer.probes.tracefs import why_absent; print(*why_absent(), sep='\\n')"
LEAVE = "umount -l /sys/kernel/tracing || true; "
EMPTY = "mount -t tmpfs none /sys/kernel/tracing/events; "
SELINUX = "mount -t tmpfs none /sys/fs; mkdir /sys/fs/selinux; echo 1 > /sys/fs/selinux/enforce; "
LOCKED = "mount -t tmpfs none /sys/kernel/security; echo 'none integrity [confidentiality]' > /sys/kernel/security/lockdown; "
NO_MOUNT = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")


def inside(preparation: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A command in a mount namespace of its own that was prepared by a shell's words; skips where there can be none."""
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    words = ["unshare", "-m", "sh", "-c", f'set -e; {preparation}exec "$@"', "sh", *command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.needs("probes")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
@pytest.mark.parametrize(
    ("preparation", "way", "cause"),
    [
        (LEAVE, (), ""),
        (LEAVE, NO_MOUNT, "not mounted, and cannot be: this process lacks CAP_SYS_ADMIN"),
        (LEAVE + SELINUX, NO_MOUNT, "SELinux is enforcing"),
        (EMPTY + LOCKED, (), "mounted at /sys/kernel/tracing but empty: the kernel is locked down"),
        (EMPTY, ("setpriv", "--reuid", "65534"), "only root can read it"),
        (LEAVE + "mount --bind {none} /proc/filesystems; ", NO_MOUNT, "this kernel has none"),
    ],
    ids=["mounted by us", "no right to mount", "SELinux", "locked down", "not root", "not in the kernel"],
)
def test_why_tracefs_is_missing_is_told_by_its_cause(tmp_path: Path, preparation: str, way: tuple[str, ...], cause: str) -> None:
    (tmp_path / "none").write_text("nodev\tproc\n")
    done = inside(preparation.format(none=tmp_path / "none"), *way, sys.executable, "-c", WHY)
    assert done.returncode == 0, done.stderr
    why, remedy = done.stdout.removesuffix("\n").split("\n")
    assert cause in why and bool(why) == bool(remedy) == bool(cause)
    assert ("SELinux" in why) == ("SELinux" in cause) and ("locked down" in why) == ("locked down" in cause)


@pytest.mark.needs("probes")
def test_a_file_of_types_makes_the_doctor_content_on_a_kernel_without_btf(tmp_path: Path) -> None:
    types = tmp_path / "kernel.btf"
    types.write_bytes(VMLINUX.read_bytes())
    for words, code in (((), 1), (("--btf", str(types)), 0)):
        done = inside("mount -t tmpfs none /sys/kernel/btf; ", sys.executable, "-m", "tracer", "doctor", "--json", *words)
        assert done.returncode == code, done.stderr
        checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
        for name in ("kernel BTF", "recorder loads and probes", "BPF programs accepted"):
            assert checks[name]["ok"] == bool(words)
    assert checks["kernel BTF"]["seen"] == str(types)
    if not lacking("htp"):
        assert "HTP emulator" in checks["onnxruntime-qnn"]["seen"] or os.uname().machine == "aarch64"


@pytest.mark.parametrize("name", ["/nonexistent", "/bin/sh", "/etc/passwd", "/dev/null"])
@pytest.mark.parametrize("verb", [("doctor",), ("run", "--", "true")], ids=["doctor", "run"])
def test_a_file_without_types_is_named_in_one_line(verb: tuple[str, ...], name: str) -> None:
    words = [sys.executable, "-m", "tracer", verb[0], "--btf", name, *verb[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (FAILED if verb[0] == "run" else 2) and done.stderr.count("\n") == 1
    assert f"--btf {name}" in done.stderr or "not root" in done.stderr


def test_the_library_of_the_hexagon_queues_is_looked_for_and_called_unconfirmed(tmp_path: Path) -> None:
    absent = check_hexagon(tmp_path)
    (tmp_path / "vendor/lib64").mkdir(parents=True)
    (tmp_path / "vendor/lib64/libcdsprpc.so").touch()
    there = check_hexagon(tmp_path)
    assert (absent.ok, there.ok, there.seen) == (False, True, str(tmp_path / "vendor/lib64/libcdsprpc.so"))
    assert "confirmed" in there.needed_for


def test_every_engine_that_reaches_an_npu_says_what_stood_for_it() -> None:
    seen = engines_on_npus()
    assert not seen.required and "confirmed" in seen.needed_for
    for name in ("executorch", "genie", "hexagon", "onnxruntime-genai", "qnn"):
        assert f"{name}: " in seen.seen
