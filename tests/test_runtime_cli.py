"""The command line: one line for each mistake, numbers that add up, nothing partial left behind."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moescope.__main__ import main
from runtime import MoE
from runtime.package.convert import PackageFormat, convert
from runtime.package.demo_model import write_demo_model
from runtime.package.layout import sha256
from runtime.package.tokens import ChatTemplate, read_tokenizer
from tests.golden import Golden
from tests.runtime_models import PROMPT, shard

ROOT = Path(__file__).resolve().parents[1]
GENERATE = ["--prompt", PROMPT, "--max-new-tokens", "6"]


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return write_demo_model(tmp_path / "demo")


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line on standard error of a command that must fail as wrong use."""
    capsys.readouterr()
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    lines = [line for line in error.splitlines() if "is not built" not in line]
    assert out == ""
    assert len(lines) == 1, error
    return lines[0]


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensor(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray] | None) -> None:
    """Replace a tensor of the model, or remove it."""
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    save_file(tensors | ({name: change(tensor)} if change else {}), folder / "model.safetensors")


def test_an_unknown_architecture_is_refused_with_the_known_ones(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(demo, model_type="gpt2")
    line = refused(capsys, ["generate", str(demo), *GENERATE])
    assert "'gpt2'" in line
    assert "qwen3_moe" in line


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "low_freq_factor"),
        ({"hidden_size": 64}, "config.json says"),
        ({"hidden_size": "wide"}, "config.json"),
    ],
)
def test_what_the_runtime_does_not_build_is_refused(
    demo: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], told: str
) -> None:
    change_config(demo, **changes)
    assert told in refused(capsys, ["generate", str(demo), *GENERATE])


def test_a_missing_shard_is_named_and_no_package_is_left(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard(demo)
    (demo / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refused(capsys, ["generate", str(demo), *GENERATE])
    assert [path.name for path in demo.iterdir() if path.name.startswith(".")] == []


def test_a_truncated_shard_is_named_and_no_package_is_left(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = demo / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "truncated" in refused(capsys, ["generate", str(demo), *GENERATE])
    assert [path.name for path in demo.iterdir() if path.name.startswith(".")] == []


def test_a_missing_tensor_is_named_and_no_package_is_left(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_tensor(demo, "model.layers.2.mlp.experts.5.up_proj.weight", None)
    assert "model.layers.2.mlp.experts.5.up_proj.weight" in refused(capsys, ["generate", str(demo), *GENERATE])
    assert [path.name for path in demo.iterdir() if path.name.startswith(".")] == []


def test_a_transposed_tensor_is_named_with_both_shapes(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    change_tensor(demo, name, lambda tensor: np.ascontiguousarray(tensor.T))
    shape = list(load_file(demo / "model.safetensors")[name].shape)
    line = refused(capsys, ["generate", str(demo), *GENERATE])
    assert name in line and f"{shape}" in line and f"{shape[::-1]}" in line


def test_a_missing_tokenizer_is_refused(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (demo / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(capsys, ["generate", str(demo), *GENERATE])


def test_a_prompt_that_is_no_text_is_refused(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt").write_bytes("Höhe".encode("latin-1"))
    assert str(tmp_path / "prompt") in refused(capsys, ["generate", str(demo), "--prompt-file", str(tmp_path / "prompt")])


WRONG = ("--top-p 0", "--temperature -1", "--chunk 0", "--tiers a,b", "--prompt=", "--expert-cache lots", "--expert-cache 200KiB")


def test_impossible_requests_are_refused_in_a_line(demo: Path, tmp_path: Path, capsys, golden: Golden) -> None:
    typed = [[str(demo), *GENERATE, *words.split()] for words in WRONG] + [[str(demo), *GENERATE, "--prompt", PROMPT * 100]]
    typed += [[str(tmp_path), *GENERATE], [str(tmp_path / "nowhere"), *GENERATE]]
    golden("generate", "\n".join(refused(capsys, ["generate", *words]) for words in typed))


def test_a_folder_that_is_no_package_is_not_overwritten(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("all of it")
    assert str(precious) in refused(capsys, ["generate", str(demo), *GENERATE, "--package", str(precious)])
    assert (precious / "thesis.txt").read_text() == "all of it"


def test_json_and_log_tell_the_same_story(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.json"
    arguments = ["generate", str(demo), *GENERATE, "--expert-cache", "2MiB", "--chunk", "8", "--json", "--log", str(log)]
    assert main(arguments) == 0
    told, written = json.loads(capsys.readouterr().out), json.loads(log.read_text())
    statistics = written["statistics"]
    assert told["statistics"] == statistics
    assert told["tokens"] == [step["sampled"] for step in written["steps"]]
    assert [step["phase"] for step in written["steps"]] == ["prefill"] + ["decode"] * 5
    assert (
        sum(entry["runs"] for entry in written["expert_runs"])
        == statistics["expert_runs"]
        == statistics["graph_runs"]["expert"]["cpu"]
    )
    chosen = {(r["seq"], r["layer"], e) for r in written["routing"] for row in r["experts"] for e in row}
    assert len(chosen) == statistics["hits"] + statistics["misses"] == statistics["expert_runs"]
    assert np.allclose([sum(row) for r in written["routing"] for row in r["weights"]], 1, atol=1e-5)
    rows = [len(r["experts"]) for r in written["routing"] if r["seq"] == 0 and r["layer"] == 0]
    assert sum(rows) == written["steps"][0]["n_tokens"] == statistics["prompt_tokens"]
    assert max(rows) == 8
    assert statistics["total_ns"] == sum(step["duration_ns"] for step in written["steps"])


def test_a_package_speaks_like_its_model_and_inspect_finds_damage(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "package"
    assert main(["generate", str(demo), *GENERATE]) == 0
    expected = capsys.readouterr().out
    assert main(["convert", str(demo), str(package)]) == 0
    capsys.readouterr()
    assert main(["generate", str(package), *GENERATE]) == 0
    assert capsys.readouterr().out == expected
    assert main(["inspect", "--json", str(package)]) == 0
    assert json.loads(capsys.readouterr().out)["damaged_files"] == []
    victim = package / "experts_01.bin"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert main(["inspect", str(package)]) == 1
    assert "experts_01.bin" in capsys.readouterr().out
    assert "experts_01.bin" in refused(capsys, ["generate", str(package), *GENERATE])
    victim.unlink()
    assert "experts_01.bin" in refused(capsys, ["generate", str(package), *GENERATE])


def test_a_package_of_an_older_format_asks_to_be_converted_again(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = convert(demo, tmp_path / "package").folder
    manifest = json.loads((package / "manifest.json").read_text())
    (package / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    line = refused(capsys, ["generate", str(package), *GENERATE])
    assert "format 1" in line and "convert again" in line


def test_every_expert_is_one_aligned_read_that_matches_its_hash(demo: Path, tmp_path: Path) -> None:
    package = convert(demo, tmp_path / "package", None, PackageFormat(backend="cpu", bits=4))
    hashes = package.manifest["experts"]["layers"]
    for layer in range(package.family.layers):
        for expert in range(package.family.experts):
            place = package.expert_range(layer, expert)
            assert place.offset % 4096 == package.expert_stride % 4096 == 0
            with place.path.open("rb") as file:
                content = os.pread(file.fileno(), place.bytes, place.offset)
            assert sha256(content) == hashes[str(layer)]["sha256"][expert]
            assert bytes(package.mapped_expert(layer, expert)) == content


def test_an_interrupted_conversion_goes_on_where_it_stopped(demo: Path, tmp_path: Path) -> None:
    whole, target = convert(demo, tmp_path / "whole"), tmp_path / "package"

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(demo, target, interrupt)
    assert not target.exists()
    partial = tmp_path / ".package.partial"
    finished = {path.name: path.stat().st_mtime_ns for path in partial.glob("experts_*.bin")}
    resumed = convert(demo, target)
    assert not partial.exists()
    assert resumed.manifest == whole.manifest
    kept = [name for name, time in finished.items() if (target / name).stat().st_mtime_ns == time]
    assert "experts_00.bin" in kept


def test_a_second_conversion_of_the_same_package_is_refused(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def second(done: int, total: int) -> None:
        if done == 1:
            assert "another conversion" in refused(capsys, ["convert", str(demo), str(tmp_path / "package")])

    assert convert(demo, tmp_path / "package", second).damaged() == []


def test_a_full_disk_leaves_nothing_behind(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        assert "No space" in refused(capsys, ["convert", str(demo), str(disk / "package")])
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_quantized_weights_that_the_npu_does_not_take_are_refused(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, large = str(tmp_path / "package"), ["--bits", "4", "--block", "256"]
    assert "--block 128" in refused(capsys, ["convert", str(demo), target, "--backend", "qnn", *large])
    assert main(["convert", str(demo), target, *large]) == 0
    line = refused(capsys, ["generate", target, *GENERATE, "--prefill-backend", "htp"])
    assert "--backend qnn" in line or "not installed" in line


def test_text_ends_before_a_stop_text_even_inside_a_token(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(demo), "--prompt", PROMPT, "--max-new-tokens", "12", "--ignore-end"]
    assert main(arguments) == 0
    whole = capsys.readouterr().out[:-1]
    for stop in (whole[5:9], whole[11], whole[-3:]):
        assert main([*arguments, "--stop", stop]) == 0
        assert capsys.readouterr().out == whole[: whole.index(stop)] + "\n"
    assert main([*arguments, "--stop", "never said \u1234"]) == 0
    assert capsys.readouterr().out == whole + "\n"


def test_ctrl_c_ends_generation_with_the_text_so_far(demo: Path) -> None:
    command = [sys.executable, "-m", "moescope", "generate", str(demo), "--prompt", PROMPT]
    command += ["--max-new-tokens", "900", "--ignore-end"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"Traceback" not in error and b"ms per token" in error


def test_bench_prints_rows_like_llama_bench(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["bench", str(demo), "-p", "24", "-n", "4", "-r", "2", "--expert-cache", "1.2MiB"]
    assert main([*small, "-o", "json"]) == 0
    prompt, text = json.loads(capsys.readouterr().out)["tests"]
    assert (prompt["test"], text["test"]) == ("pp24", "tg4")
    for row in (prompt, text):
        assert row["demand_bytes_per_token"] > 0
        assert 0 < row["stall_ms_per_token"] < 10 * 1000 / row["tokens_per_second"]  # the speed is a mean of both repetitions'
        assert 0 <= row["hit_rate"] < 1 and row["padding_waste"] == 0 and row["peak_pss_bytes"] > 10 << 20
    assert main([*small, "-o", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main([*small, "-n", "0"]) == 0
    assert "| pp24 |" in capsys.readouterr().out


def test_chat_answers_every_line_in_the_models_template(demo: Path) -> None:
    path = demo / "tokenizer_config.json"
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    package = convert(demo, demo.parent / "package").folder
    messages = [{"role": "user", "content": "Hello"}]
    tokenizer = read_tokenizer(package)
    assert tokenizer.decode(ChatTemplate(package).ids(messages)) == "[user]Hello[assistant]"
    expected = "".join(t.text for t in MoE.load(package).generate("[user]A cache[assistant]", 5))
    command = [sys.executable, "-m", "moescope", "chat", str(package), "--max-new-tokens", "5"]
    done = subprocess.run(command, cwd=ROOT, input="A cache\n\nMore\n", capture_output=True, text=True, check=True)
    assert done.stdout.startswith(expected + "\n") and done.stdout.count("\n") >= 2


def test_a_long_talk_goes_on_without_its_oldest_turns_and_clear_begins_anew(
    demo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = ["First question", "word " * 600, "word " * 600, "word " * 1200, "More", "/clear", "First question"]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    with (tmp_path / "lines").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["chat", str(demo), "--max-new-tokens", "5", "--system", "Be brief"]) == 0
    out, error = capsys.readouterr()
    answers = out.splitlines()
    assert len(answers) == 5 and answers[0] == answers[4] != ""
    without_template, *others = error.splitlines()
    assert "chat template" in without_template
    assert [re.findall(r"\d+", line) for line in others] == [["1024", "2"], ["1024"]]  # turns dropped, a line refused


def test_a_changed_model_is_converted_again(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def routed() -> object:
        assert main(["generate", str(demo), *GENERATE, "--log", str(demo / "log.json")]) == 0
        capsys.readouterr()
        return json.loads((demo / "log.json").read_text())["routing"]

    before = routed()
    assert routed() == before
    write_demo_model(demo, seed=7)
    assert routed() != before


def test_a_model_in_a_read_only_folder_is_converted_into_the_users_cache(demo: Path, tmp_path: Path) -> None:
    demo.chmod(0o555)
    script = "import os, sys; from pathlib import Path; from runtime.package.layout import default_target\n"
    script += "if os.getuid() == 0: os.setuid(65534)\n"
    script += "print(default_target(Path(sys.argv[1])))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", script, str(demo)], env=environment, check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()).parent == tmp_path / "cache" / "moescope"


def test_help_is_shown_without_loading_onnxruntime() -> None:
    script = "import sys; from moescope.__main__ import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass\n"
    script += "assert not {'onnxruntime', 'onnx', 'numpy'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--prefill-backend" in done.stdout
    assert "moescope generate" in done.stdout


def test_the_runtime_needs_neither_torch_nor_transformers_nor_the_other_rooms(demo: Path) -> None:
    script = "import sys; from moescope.__main__ import main\n"
    script += f"assert main(['generate', {str(demo)!r}, '--prompt', 'A', '--max-new-tokens', '1']) == 0\n"
    script += "assert not {'torch', 'transformers', 'tracer', 'analyzer', 'views'} & set(sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
