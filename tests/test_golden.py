"""What each verb prints about fixed inputs, and how commands that record refuse wrong ones, is what tests/data/golden holds."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from analyzer.compare.results import save_result
from analyzer.imports.run_folder import Run, write_run
from moescope.__main__ import main
from moescope.answers import forget_labels
from moescope.verbs import FORMS
from tests.golden import FOLDER, Golden, sections_of
from tests.test_analyzer_tables import llama
from tests.test_compare import recorded_builds, result
from workloads import ROOT
from workloads.fuzzing import copy_files, make_routes
from workloads.planting import stretch_ranges
from workloads.recordings import Writer, runtime
from workloads.tables_fixture import make_tables

RECORDINGS = ("run", "raw", "llama", "empty")
"""Our runtime with an NPU and threads, as tables; the same from records; llama.cpp; without a record."""
READS = (
    "summary",
    "findings",
    "npu",
    "roofline",
    "trends",
    "time requests",
    "time threads",
    "time stacks",
    "npu backends",
    "predict steps",
)
PRINTED = {
    **dict.fromkeys((*READS, "predict fidelity"), "{}"),
    "time": "{}; run --step 0; run --by cause",
    "experts": "{}; run --curves",
    "query": "run; run 'select phase, count(*) as n from tokens group by 1 order by 1'; run 'select no from tokens'",
    "query perfetto": "",
    "import": "qnn/onnxruntime.csv qnn/linting.csv; qnn/linting.csv --mhz 1000; qnn/qhas.json; absent",
    "compare": "base cand; base base; run raw; base absent",
    "history": "builds; absent",
    "predict": "--config qwen3 --device h20 --phase decode; --config qwen3 --device h800 --phase prefill --ep 2",
    "predict device": "--show h20",
    "predict quantization": "run run --accuracy 0.8 0.72; run empty --accuracy 0.8 0",
    "simulate": "run --cache 25%,50%; routes/route-trace.csv --measured routes/steps.metrics --cache 50%; raw --cache much",
    "open": "absent",
    "top": "run --once",
    "write": "routes/route-trace.csv --format layer-expert --out rows.csv; empty --format counts",
    "inspect": "absent",
    "help": "; time threads; no",
}
"""Form of a verb → its words, several times; {} stands for each of RECORDINGS."""
REFUSED = {
    "run": "-o run -- /bin/true; --duration x -- /bin/true; -o new -- ./absent; --min-tps 1 --levels sched -- /bin/true; "
    "--pmc faults,branches-of-law -- /bin/true; --pmc faults,cs,task-clock,cpu-clock,migrations -- /bin/true",
    "attach": "--pid 999999999; --pid 1 --levels nothing; name",
    "plan": "; ./absent; --features absent.json -- /bin/true",
    "probes": "./absent; --probes absent.toml /bin/true",
}
"""The same of verbs that record."""
SLOWER = 1 + 0.02 * np.arange(12) + 2 * (np.arange(12) == 7) + np.random.default_rng(1).normal(0, 0.01, 12)
"""How much longer each step of `run` takes: a drift, and one slow step."""
MEASURING = {"doctor", "compare --", "predict kernels", "predict ceilings", "bench prompts"}
"""Forms that print what this machine measured, or have a test of their own."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that PRINTED names."""
    folder = tmp_path_factory.mktemp("golden")
    manifest, tables = make_tables(tokens=12)
    steps = tables["tokens"]
    stretched = stretch_ranges(tables, steps["begin_ns"].to_numpy(), steps["end_ns"].to_numpy(), SLOWER)
    write_run(folder / "run", Run("moescope", dict(stretched)), **manifest)
    for name, writer in (("raw", runtime(4)), ("llama", llama(6)), ("empty", Writer())):
        writer.write(folder / name)
    for side, factor in (("base", 1.0), ("cand", 1.3)):
        (folder / side).mkdir()
        for i in range(4):
            made = result(f"{side}-{i}", i + 100 * (factor > 1), "attention", factor, began=2.0 * i + (side == "cand"))
            save_result(made, folder / side / f"{i}.parquet")
    recorded_builds(str(folder / "builds"), 5)
    copy_files("qnn/onnxruntime.csv", "qnn/linting.csv", "qnn/qhas.json")(folder / "qnn")
    copy_files("infersim/hf_configs/qwen3-8B_config.json")(folder / "qwen3")
    (folder / "qwen3" / "qwen3-8B_config.json").rename(folder / "qwen3" / "config.json")
    make_routes(folder / "routes")
    return folder


def printed(form: str, words: str, capfd: pytest.CaptureFixture[str]) -> str:
    """A command, what it printed, and its exit code; without argparse's usage."""
    forget_labels()
    try:
        code: object = main([*form.split(), *shlex.split(words)])
    except SystemExit as end:
        code = end.code
    shown = capfd.readouterr()
    errors = re.sub(r"usage: .*?\n(?=\S)", "", shown.err, flags=re.S)
    return f"$ moescope {form} {words}".rstrip() + f"\n{shown.out}{errors}exit code {code}\n"


def all_printed(form: str, words: str, capfd: pytest.CaptureFixture[str]) -> str:
    """The same of several, separated by semicolons."""
    each = [line.strip() for line in words.split(";")]
    lines = [line.format(name) for line in each for name in (RECORDINGS if "{}" in line else ("",))]
    return "\n".join(printed(form, line, capfd) for line in lines)


@pytest.fixture(autouse=True)
def typed_there(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's working directory and command line."""
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(sys, "argv", ["moescope"])


@pytest.mark.parametrize("form", PRINTED)
def test_a_verb_prints_its_sentences(form: str, golden: Golden, capfd: pytest.CaptureFixture[str]) -> None:
    golden(form.split()[0], all_printed(form, PRINTED[form], capfd))


@pytest.mark.needs("probes", "recorder")
@pytest.mark.parametrize("form", REFUSED)
def test_a_verb_that_records_refuses_in_a_line(form: str, golden: Golden, capfd: pytest.CaptureFixture[str]) -> None:
    golden(form, all_printed(form, REFUSED[form], capfd))


def test_every_section_is_of_a_test_that_exists_and_every_form_that_reads_has_one() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    names = [name for path in FOLDER.glob("*.txt") for name in sections_of(path)]
    assert [name for name in names if f"def {name.partition('[')[0]}(" not in tests] == []
    runs_models = {form for form, verb in FORMS.items() if verb.module.startswith("runtime.") and form != "inspect"}
    assert set(FORMS) - {*PRINTED, *REFUSED} - runs_models == MEASURING
