"""What goes wrong outside of the runtime: one clear line, nothing left behind, no hang."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from moescope.__main__ import main
from runtime import MoE
from runtime.backends import htp
from runtime.errors import ModelError, PackageError
from runtime.models import FAMILIES, read_family
from runtime.models.keys import KIND_OF
from runtime.package.convert import PackageFormat, convert
from runtime.package.demo_model import DemoSizes, write_demo_model
from runtime.package.layout import Package, sha256
from runtime.telemetry import probes
from tests.runtime_models import PROMPT

ROOT = Path(__file__).resolve().parents[1]
SIZES = DemoSizes(hidden=64, layers=2, experts=8, intermediate=256, vocabulary=400, context=256)
GENERATE = ["--prompt", PROMPT, "--max-new-tokens", "8", "--ignore-end"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return convert(write_demo_model(tmp_path / "model", sizes=SIZES), tmp_path / "package").folder


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("moescope: ")
    return line


def rewrite(package: Path, name: str, **changes: object) -> None:
    """Change a JSON file of the package and give the manifest its hash: what somebody else's program might have written."""
    content = json.dumps(json.loads((package / name).read_text()) | changes).encode()
    (package / name).write_bytes(content)
    manifest = json.loads((package / "manifest.json").read_text())
    if name in manifest["files"]:
        manifest["files"][name] = {"bytes": len(content), "sha256": sha256(content)}
        (package / "manifest.json").write_text(json.dumps(manifest))


def test_a_package_of_another_architecture_or_format_says_so(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(package, "config.json", model_type="gpt2")
    assert "'gpt2'" in refused(capsys, ["generate", str(package), *GENERATE])
    rewrite(package, "config.json", model_type="mixtral")
    assert "qwen3_moe" in refused(capsys, ["generate", str(package), *GENERATE])
    rewrite(package, "manifest.json", format=99)
    assert "format 99" in refused(capsys, ["generate", str(package), *GENERATE])


@pytest.mark.parametrize("subgraphs", [7, None, {"expert": 7}, ["expert"]])
def test_a_package_whose_manifest_lost_its_digests_is_refused(
    package: Path, capsys: pytest.CaptureFixture[str], subgraphs: object
) -> None:
    rewrite(package, "manifest.json", subgraphs=subgraphs)
    assert "manifest.json" in refused(capsys, ["inspect", str(package)])


@pytest.mark.skipif(bool(htp.why_unavailable()), reason=htp.why_unavailable() or "HTP at hand")
def test_binaries_of_another_backend_version_are_made_again_and_it_is_said(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = htp.binary_versions()
    rewrite(package, "manifest.json", compiled={"tiers": [8], "versions": versions | {"onnxruntime-qnn": "1.0"}})
    expected = [t.id for t in MoE.load(package).generate(PROMPT, 2)]
    model = MoE.load(package, prefill_backend="htp", chunk=32)
    assert [t.id for t in model.generate(PROMPT, 2)] == expected
    model.close()
    assert f"onnxruntime-qnn 1.0 (here {versions['onnxruntime-qnn']})" in capsys.readouterr().err


def test_a_soc_that_is_none_is_refused_and_one_that_the_emulator_refuses_is_named(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    htp_too = [*GENERATE, "--prefill-backend", "htp"]
    assert "'abc'" in refused(capsys, ["generate", str(package), *htp_too, "--soc", "abc"])
    if not htp.why_unavailable():
        assert "'abc'" in refused(capsys, ["convert", str(package), str(package / "other"), "--soc", "abc"])
        if htp.EMULATED:
            assert "9999" in refused(capsys, ["generate", str(package), *htp_too, "--soc", "9999"])


@pytest.mark.parametrize("verb", [["tune"], ["tune predictor", "--text", __file__]])
def test_a_package_that_cannot_be_written_is_refused_before_anything_is_measured(package: Path, verb: list[str]) -> None:
    command = f'mount --bind {package} {package} && mount -o remount,ro,bind {package} && echo mounted && exec "$@"'
    arguments = [sys.executable, "-m", "moescope", *verb[0].split(), str(package), *verb[1:]]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, "sh", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if "mounted" not in done.stdout:
        pytest.skip("nothing can be mounted read-only here")
    assert done.returncode == 2
    assert str(package) in done.stderr and done.stderr.count("\n") == 1


GEMMA = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 8}
GEMMA |= {"hidden_size_per_layer_input": 0, "num_hidden_layers": 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_no_family_builds_are_refused_by_all(family: str) -> None:
    config = {"model_type": family, "layer_types": ["full_attention", "no_such_attention"], "num_attention_heads": 4}
    config |= {"moe_num_experts": 8, "moe_k": 2, "score_function": "sigmoid"} | GEMMA  # as ERNIE, Ling and Gemma name them
    with pytest.raises(ModelError, match="'no_such_attention'"):
        read_family(config, Path("model"))


STRANGE = [None, True, 0, -1, 1, 3, 0.5, 1e308, float("nan"), float("inf"), 10**30, "text", "true", "5", [], {}, [1, "a"], [None]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_of_another_kind_is_refused_by_its_key_and_never_with_a_traceback(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    published = Path(__file__).parent / "data" / "published_configs" / f"{family.removesuffix('_v2')}.json"
    made = None if published.exists() else transformers.AutoConfig.for_model(family)
    text = getattr(made, "text_config", made).to_json_string(use_diff=False) if made else published.read_text()
    config = json.loads(text) | {"model_type": family}
    config |= {"num_experts_per_tok": config.get("num_experts_per_tok") or 2, "head_dim": 128}
    config |= {"layer_types": ["conv"] * config["num_hidden_layers"]} if family == "lfm2_moe" else {}
    config |= {"n_routed_experts": 8} if family == "dots1" else {}
    config |= GEMMA | {"num_hidden_layers": config["num_hidden_layers"]} if family.startswith("gemma4") else {}
    read_family(config, Path("model"))
    drawn, refused = np.random.default_rng(0), 0
    for key, kind in KIND_OF.items():
        for value in (STRANGE[i] for i in drawn.choice(len(STRANGE), 6, replace=False)):
            try:
                read_family(config | {key: value}, Path("model"))
                assert kind.accepts(value)
            except ModelError as error:
                if not kind.accepts(value):
                    shown = json.dumps(value)
                    start = f"model/config.json has {key} {shown}, expected is {kind.expected}: "
                    assert str(error).startswith(start)
                    refused += 1
                assert "\n" not in str(error)
    assert refused > 2 * len(KIND_OF)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 2), ("enable_moe_block", False)],
        *[("use_bidirectional_attention", "all"), ("hidden_activation", "silu"), ("per_layer_config", {"0": {"head_dim": 32}})],
    ],
)
def test_what_is_not_built_of_gemma_4_is_refused_by_its_key(key: str, value: object) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("gemma4").text_config.to_dict() | GEMMA
    config |= {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    config["per_layer_config"] = {"5": {"head_dim": 512}}
    assert read_family(config, Path("model")).at(5).head_dim == 512
    with pytest.raises(ModelError, match=key):
        read_family(config | {key: value}, Path("model"))


@pytest.mark.parametrize("scaling", ["linear", "yarn", "longrope", "llama3"])
def test_strange_rotary_settings_are_refused_by_their_key(scaling: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("mixtral").to_dict()
    pairs = config["hidden_size"] // config["num_attention_heads"] // 2
    settings = {"rope_type": scaling, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
    settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": [1.0] * pairs, "long_factor": [1.0] * pairs}
    for key in settings:
        for value in STRANGE:
            try:
                read_family(config | {"rope_parameters": settings | {key: value}}, Path("model"))
            except ModelError as error:
                assert key in str(error) and "\n" not in str(error)
            else:
                assert KIND_OF[key].accepts(value)


@pytest.mark.parametrize(("bits", "cache"), [(4, "100KiB"), (4, "all"), (32, "400KiB"), (32, "all")])
def test_a_disk_that_goes_away_while_experts_load_ends_in_one_line(tmp_path: Path, bits: int, cache: str) -> None:
    if not probes.built:
        pytest.skip("runtime/telemetry/_probes.so is not built: mapped files are not guarded")
    model = write_demo_model(tmp_path / "model", sizes=SIZES)
    with failing_disk(tmp_path) as (disk, fail):
        convert(model, disk / "package", None, PackageFormat(backend="cpu", bits=bits))
        command = [sys.executable, "-c", GO_ON_WHEN_TOLD, str(disk / "package"), cache]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout and process.stdout.readline() == "loaded\n"
            fail()
            _, error = process.communicate("\n", timeout=120)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 2
        assert error.startswith("moescope: ") and error.count("\n") == 1 and "read" in error


GO_ON_WHEN_TOLD = f"""
import sys
import runtime.moe
from moescope.__main__ import main
generate = runtime.moe.MoE.generate
def waiting(self, *arguments, **named):
    print("loaded", flush=True)
    sys.stdin.readline()
    return generate(self, *arguments, **named)
runtime.moe.MoE.generate = waiting
sys.exit(main(["generate", sys.argv[1], "--expert-cache", sys.argv[2], *{GENERATE!r}]))
"""


@contextmanager
def failing_disk(folder: Path) -> Iterator[tuple[Path, object]]:
    """A file system in a file, and how to make its device fail: cut the file off. Skips where none can be mounted."""
    image, disk = folder / "image", folder / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True)
    if made.returncode or subprocess.run(["mount", "-o", "loop", str(image), str(disk)], capture_output=True).returncode:
        pytest.skip("no file system in a file can be mounted here")

    def fail() -> None:
        os.sync()
        os.truncate(image, 1 << 20)
        for path in (disk / "package").glob("*.bin"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    try:
        yield disk, fail
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_under_the_cost_table_the_log_and_the_profile_is_told(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        with suppress(OSError), (disk / "filler").open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        for option in ("--log", "--profile"):
            line = refused(capsys, ["generate", str(package), *GENERATE, option, str(disk / "out")]).splitlines()[-1]
            assert option in line
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_manifest_that_is_cut_off_is_told(package: Path) -> None:
    path = package / "manifest.json"
    path.write_text(path.read_text()[:-200])
    with pytest.raises(PackageError, match="convert again"):
        Package(package)
