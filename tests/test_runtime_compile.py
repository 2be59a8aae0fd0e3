"""Compiling ahead for the NPU: what `convert --tiers --chunk --soc` makes is what generation runs."""

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from moescope.__main__ import main
from runtime import MoE
from runtime.backends import htp
from runtime.backends.htp import HtpBackend
from runtime.package.demo_model import DemoSizes, write_demo_model
from runtime.package.layout import Package
from tests.runtime_models import PROMPT

htp_only = pytest.mark.skipif(bool(htp.why_unavailable()), reason=htp.why_unavailable() or "HTP at hand")
SIZES = DemoSizes(hidden=64, layers=1, experts=2, intermediate=64, vocabulary=400, context=256)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_demo_model(tmp_path / "model", sizes=SIZES)


def made(package: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (package / "htp").iterdir()}


@htp_only
def test_what_was_compiled_ahead_is_what_generation_takes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "package"
    command = ["convert", str(model), str(package), "--tiers", "1,4", "--chunk", "8", "--context", "200", "--soc", "57"]
    assert main(command) == 0
    experts, attentions = SIZES.experts * 2, 2
    assert f"{experts + attentions} context binaries" in capsys.readouterr().out
    before = made(package)
    assert len(before) == experts + attentions
    expected = [t.id for t in MoE.load(package).generate(PROMPT, 3)]
    engine = MoE.load(package, prefill_backend="htp", decode_backend="htp")
    assert (engine.options.tiers, engine.options.chunk, engine.options.soc) == ((1, 4), 8, "57")
    assert [t.id for t in engine.generate(PROMPT, 3)] == expected
    engine.close()
    assert made(package) == before, "nothing was compiled at first use"
    assert main(command) == 0
    assert made(package) == before, "what is up to date is not made again"
    assert Package(package).manifest["compiled"]["contexts"] == [256]


@htp_only
def test_a_compilation_that_was_interrupted_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, opened = tmp_path / "package", []
    whole = HtpBackend._compiled

    def interrupted(self: HtpBackend, name: str, *rest: object) -> object:
        opened.append(name)
        if len(opened) == 3:
            raise KeyboardInterrupt
        return whole(self, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(HtpBackend, "_compiled", interrupted)
    command = ["convert", str(model), str(package), "--tiers", "1,4", "--chunk", "8", "--context", "128"]
    assert main(command) == 130
    assert "compiled" not in Package(package).manifest
    assert len(made(package)) == 2
    assert main(command) == 0
    assert len(opened) == 3 + 4
    assert len(made(package)) == 6


@htp_only
def test_tiers_that_share_their_weights_lie_in_one_binary_smaller_than_two(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "package"
    command = ["convert", str(model), str(package), "--tiers", "1,8", "--chunk", "8", "--context", "128"]
    assert main([*command, "--layout", "shared"]) == 0
    together = sorted(package.glob("htp/expert_*_T1-8_*"))
    assert len(together) == SIZES.experts
    for folder in together:
        assert sorted(path.suffix for path in folder.iterdir()) == [".bin", ".onnx", ".onnx"]
    assert main(command) == 0
    assert Package(package).manifest["compiled"]["layout"] == "separate"
    apart = sum(path.stat().st_size for path in package.glob("htp/expert_00_000_T[18]_*/*.bin"))
    assert sum(path.stat().st_size for path in together[0].glob("*.bin")) < apart


@pytest.mark.skipif(not htp.EMULATED, reason="a device may load binaries of shared weights")
@htp_only
def test_where_shared_binaries_cannot_be_loaded_it_is_said_and_each_tier_gets_its_own(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "package"
    command = ["convert", str(model), str(package), "--tiers", "1,8", "--chunk", "8", "--context", "128", "--layout", "shared"]
    assert main(command) == 0
    expected = [t.id for t in MoE.load(package).generate(PROMPT, 3)]
    engine = MoE.load(package, prefill_backend="htp")
    assert [t.id for t in engine.generate(PROMPT, 3)] == expected
    engine.close()
    assert "tier" in capsys.readouterr().err


def test_shapes_for_an_npu_that_the_package_leaves_out_are_refused_before_the_conversion(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "package"
    assert main(["convert", str(model), str(target), "--backend", "cpu", "--tiers", "1,8"]) == 2
    line = capsys.readouterr().err
    assert "--backend cpu" in line and line.count("\n") == 1
    assert not target.exists()


@htp_only
def test_a_disk_that_is_full_while_compiling_ends_in_one_line_and_leaves_a_whole_package(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        package = disk / "package"
        assert main(["convert", str(model), str(package)]) == 0
        filler = disk / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        capsys.readouterr()
        assert main(["convert", str(model), str(package), "--tiers", "1", "--chunk", "8"]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and "free space" in line
        filler.unlink()
        assert list((package / "htp").iterdir()) == []
        assert MoE.load(package).package.damaged() == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
