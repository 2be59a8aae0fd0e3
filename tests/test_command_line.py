"""`moescope` and the rooms' command lines: one dispatcher, what it prints and the code it ends with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moescope import __main__ as product
from moescope import extras
from moescope.calling import VARIABLE, as_called
from moescope.command_line import Program
from tests.conftest import ROOT

HEAVY = {"numpy", "pandas", "rich", "onnxruntime", "onnx", "duckdb", "pyarrow", "plotly", "networkx"}


def moescope(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moescope", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **more)


class Verb:
    """A verb whose act is given."""

    failure = 2
    help, EXAMPLES = "acts", "examples:\n  sudo python -m tracer compare -- A --vs B\n  python -m analyzer dag RUN"

    def __init__(self, act: object) -> None:
        self.act = act

    def load(self) -> "Verb":
        return self

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


def test_every_verb_of_every_room_has_one_name_of_its_own_and_a_group() -> None:
    named = [name for names in product.GROUPS.values() for name in names.split()]
    assert len(named) == len(set(named)) and set(named) == set(product.verbs())
    reached = {(verb.room.name, verb.name) for verb in product.verbs().values()}
    declared = {(room.name, verb) for room in product.rooms() for verb in room.verbs}
    assert declared - reached == {("views", "summary")}


def test_the_help_groups_all_verbs_and_imports_nothing_heavy() -> None:
    script = "import sys; from moescope.__main__ import main; code = main(['--help'])\n"
    script += f"assert not {HEAVY!r} & set(sys.modules), set(sys.modules); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in product.verbs())
    assert all(f"\n{title}\n" in done.stdout for title in product.GROUPS)


@pytest.mark.parametrize("name", sorted(product.verbs()))
def test_every_verb_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        product.main([name, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and ("examples:" in shown or "example:" in shown)
    assert f"moescope {name} " in shown.partition("example")[2]
    assert "python -m tracer" not in shown and "python -m analyzer" not in shown
    assert "python -m views" not in shown and "python -m runtime" not in shown


def test_a_verb_that_is_not_there_suggests_the_nearest() -> None:
    done = moescope("sumary")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "moescope: there is no verb 'sumary'; did you mean summary?\n"


def test_no_verb_at_all_is_wrong_use_and_shows_them() -> None:
    done = moescope()
    assert done.returncode == 2 and "usage: python -m moescope VERB" in done.stderr and "a verb is missing" in done.stderr


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
    done = subprocess.run(
        f"{sys.executable} -m moescope queries slow_tokens | head -c 5", shell=True, cwd=ROOT, capture_output=True, check=False
    )
    assert len(done.stdout) == 5 and done.stderr == b""


def test_hints_name_commands_as_the_user_called_them(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "python -m views open RUN, python -m tracer compare, sudo python -m tracer run, python -m views dag, python -m tracer"
    assert as_called(text) == text
    monkeypatch.setenv(VARIABLE, "python -m moescope")
    renamed = "python -m moescope"
    assert as_called(text) == ", ".join(
        [f"{renamed} open RUN", f"{renamed} compare-commands", f"sudo {renamed} run", f"{renamed} profdag", renamed]
    )


def test_the_installed_command_names_itself_and_for_sudo_its_path(tmp_path: Path) -> None:
    script = tmp_path / "moescope"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom moescope.__main__ import main\nsys.exit(main())\n")
    script.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([script, "run", "--help"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("usage: moescope run ")
    assert f"sudo {script} run --levels token,expert" in done.stdout
    done = subprocess.run([script, "sumary"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("moescope: ")


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
    assert extras.remedy(module) == said


def test_in_a_checkout_a_missing_base_package_is_a_case_for_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "requires", lambda _: EXTRAS)
    assert extras.remedy("numpy") == "run `make setup` in the project's folder"


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
