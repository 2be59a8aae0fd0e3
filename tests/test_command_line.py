"""`moescope` and the packages' command lines: one dispatcher, what it prints and the code it ends with."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moescope import __main__ as product
from moescope import extras
from moescope.answers import json_text
from moescope.command_line import Program
from moescope.command_line import Verb as Declared
from moescope.verbs import FORMS, GROUPS, VERBS
from tests.conftest import ROOT

HEAVY = {"numpy", "pandas", "rich", "onnxruntime", "onnx", "duckdb", "pyarrow", "plotly", "networkx"}


def moescope(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moescope", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **more)


class Verb:
    """A verb whose act is given."""

    failure = 2
    help, words, EXAMPLES = "acts", {}, "examples:\n  sudo moescope compare -- A :: B\n  moescope summary RUN"

    def __init__(self, act: object) -> None:
        self.act = act

    def load(self) -> "Verb":
        return self

    def chosen(self, words: list[str]) -> tuple[str, "Verb", list[str]]:
        return "", self, words

    def prepare(self) -> None:
        pass

    def prepare_parser(self, parser: object) -> None:
        pass

    def run(self, args: object) -> object:
        if isinstance(self.act, BaseException):
            raise self.act
        return self.act


def ended(act: object) -> int:
    return Program("prog", "label", "about", {"": {"act": Verb(act)}}).main(["act"])


def test_every_module_of_a_verb_is_one_verb_and_no_more_than_28_stand_beside_help() -> None:
    declared = sorted(verb.module for verb in FORMS.values())
    files = [path for path in ROOT.glob("*/commands/*.py") if path.stem[0] != "_" and "prepare_parser" in path.read_text()]
    assert declared == sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    assert len(VERBS) == sum(map(len, GROUPS.values())) <= 28 + len(["help"])


def test_a_word_or_two_dashes_choose_another_form_of_a_verb() -> None:
    other, pair = Declared("package.other", "other"), Declared("package.pair", "pair")
    verb = Declared("package.verb", "verb", {"other": other, "--": pair})
    assert verb.chosen(["other", "RUN"]) == ("other", other, ["RUN"])
    assert verb.chosen(["RUN", "other"]) == ("", verb, ["RUN", "other"])
    assert verb.chosen(["-o", "x", "--", "a", "::", "b"]) == ("", pair, ["-o", "x", "--", "a", "::", "b"])


def test_the_help_groups_all_verbs_and_imports_nothing_heavy() -> None:
    script = "import sys; from moescope.__main__ import main; code = main(['--help'])\n"
    script += f"assert not {HEAVY!r} & set(sys.modules), set(sys.modules); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in VERBS)
    assert all(f"\n{title}\n" in done.stdout for title in GROUPS)


def test_verbs_import_scipy_only_where_they_fit_something() -> None:
    modules = {verb.module for verb in FORMS.values() if verb.module.startswith(("analyzer", "views"))}
    asked = sorted(modules - {"analyzer.commands.kernels"})
    script = f"import sys, importlib\nfor name in {asked!r}:\n    importlib.import_module(name)\n"
    script += "    assert 'scipy' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(FORMS))
def test_every_verb_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        product.main(["compare", "--help", "--"] if name == "compare --" else [*name.split(), "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and ("examples:" in shown or "example:" in shown)
    assert f"moescope {name.removesuffix(' --')} " in shown.partition("example")[2]
    assert not re.search(r"python -m (?!moescope)", shown)


def test_a_verb_that_is_not_there_suggests_the_nearest() -> None:
    done = moescope("sumary")
    assert done.returncode == 2 and done.stdout == ""
    assert "'sumary'" in done.stderr and "summary?" in done.stderr


def test_no_verb_at_all_is_wrong_use_and_shows_them() -> None:
    done = moescope()
    assert done.returncode == 2 and "usage: python -m moescope" in done.stderr


def test_the_version_is_told() -> None:
    done = moescope("--version")
    assert done.returncode == 0 and done.stdout.startswith("moescope ")


@pytest.mark.parametrize(
    ("act", "code", "line"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (KeyboardInterrupt(), 130, ""),
        (FileNotFoundError(2, "No such file or directory", "nowhere"), 2, "label: nowhere: No such file or directory\n"),
        (OSError("odd"), 2, "label: odd\n"),
        (ModuleNotFoundError("", name="onnxruntime_qnn"), 2, "label: onnxruntime_qnn is not installed: "),
        (
            ModuleNotFoundError("", name="analyzer.records._joins"),
            2,
            "label: analyzer.records._joins is not built: run `make build`\n",
        ),
    ],
)
def test_every_way_to_end_has_its_code_and_one_line(capsys: pytest.CaptureFixture[str], act, code: int, line: str) -> None:
    assert ended(act) == code
    shown = capsys.readouterr()
    assert shown.err.startswith(line) and shown.err.count("\n") == bool(line) and not shown.out


@pytest.mark.parametrize(
    "module", ["tracer.errors", "tracer.recording.format", "analyzer.errors", "views.errors", "runtime.errors"]
)
def test_the_rooms_errors_become_one_line(capsys: pytest.CaptureFixture[str], module: str) -> None:
    from importlib import import_module

    kinds = [kind for kind in vars(import_module(module)).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert kinds
    for kind in kinds:
        assert ended(kind("the fact:\n the remedy \x1b[2J")) == 2
        assert capsys.readouterr().err == "label: the fact: the remedy \\x1b[2J\n"


def test_a_missing_module_of_the_project_itself_is_a_bug_and_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError):
        ended(ModuleNotFoundError("", name="analyzer.nothing"))


def test_a_reader_that_goes_away_ends_the_program_quietly() -> None:
    command = f"{sys.executable} -m moescope query perfetto slow_steps | head -c 5"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, check=False)
    assert len(done.stdout) == 5 and done.stderr == b""


def test_the_tracers_own_spelling_takes_the_same_verbs() -> None:
    words = [[sys.executable, "-m", package, "compare", "--help", "--"] for package in ("tracer", "moescope")]
    shown = [subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=True).stdout for each in words]
    assert shown[0].partition("options:")[2] == shown[1].partition("options:")[2] != ""


@pytest.mark.parametrize("package", ["tracer", "moescope", ""])
def test_who_is_not_root_is_told_what_to_type_after_sudo(tmp_path: Path, package: str) -> None:
    script = tmp_path / "moescope"
    of_package = f"import runpy; runpy.run_module({package!r}, run_name='__main__', alter_sys=True)"
    installed = "from moescope.__main__ import main; sys.exit(main())"
    script.write_text(f"#!{sys.executable}\nimport os, sys; os.geteuid = lambda: 1000\n{of_package if package else installed}\n")
    script.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([script, "run", "true"], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert f"`sudo {f'python3 -m {package}' if package else script} ...`" in done.stderr


PRESSED = """
import os, runpy, signal, sys
class Press:
    @staticmethod
    def find_spec(name, *_):
        if name == "moescope.verbs":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press)
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("package", ["tracer", "moescope"])
def test_ctrl_c_while_modules_are_imported_ends_a_command_without_a_traceback(package: str) -> None:
    done = subprocess.run([sys.executable, "-c", PRESSED, package], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


EXTRAS = ["numpy>=2.0", "onnxruntime>=1.24; extra == 'runtime'", 'onnxruntime-qnn>=2.0 ; extra == "npu"']
EXTRAS += ["scikit-learn>=1.6; extra == 'all'", "scikit-learn>=1.6; extra == 'kernels'", "dask[dataframe]>=1; extra == 'history'"]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("onnxruntime", "pip install 'moescope[runtime]'"),
        ("onnxruntime_qnn", "pip install 'moescope[npu]'"),
        ("sklearn", "pip install 'moescope[kernels]'"),
        ("dask", "pip install 'moescope[history]'"),
        ("numpy", "pip install numpy"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_holds_it(monkeypatch, tmp_path: Path, module: str, said: str) -> None:
    monkeypatch.setattr(extras, "requires", lambda _: EXTRAS)
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path / "none")
    assert extras.install_remedy(module) == said


def test_in_a_checkout_a_missing_base_package_is_a_case_for_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "requires", lambda _: EXTRAS)
    assert extras.install_remedy("numpy") == "run `make setup` in the project's folder"


def test_a_system_python_without_the_packages_goes_on_in_the_projects_environment(tmp_path) -> None:
    """What `sudo python3 -m moescope` does: an interpreter that sees none of the project's packages."""
    (tmp_path / "empty").mkdir()
    made = subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=False)
    bare = tmp_path / "bare" / "bin" / "python"
    if made.returncode or not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("no virtual environments here")
    for package in ("moescope", "tracer"):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        verb = [str(bare), "-m", package, "probes", "--help"]
        done = subprocess.run(verb, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"python -m {package} probes" in done.stdout


def test_numbers_that_json_lacks_are_null() -> None:
    value = {"list": [math.nan, math.inf, np.float32(-math.inf), np.int64(3)], "table": pd.DataFrame({"x": [math.inf, 0.5]})}
    assert json.loads(json_text(value)) == {"list": [None, None, None, 3], "table": [{"x": None}, {"x": 0.5}]}
