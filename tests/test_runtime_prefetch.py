"""Background loads and prediction: the same text as with everything in memory, errors in one line, nothing that hangs."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from itertools import dropwhile
from pathlib import Path
from threading import Event, current_thread
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest

from moescope.__main__ import main
from runtime import MoE
from runtime.cache_rules.eviction import LRU
from runtime.cache_rules.forms import Cache, Form, Reason
from runtime.errors import PackageError
from runtime.experts.cache import ExpertCache
from runtime.experts.loader import URGENT, ExpertLoader, Ticket
from runtime.experts.predictor import Predictor, log_odds, probability_of
from runtime.experts.prefetch import SCARCE, SPARE, Prefetcher, log_odds_of
from runtime.experts.routing import History
from runtime.package.convert import convert
from runtime.package.demo_model import DemoSizes, write_demo_model
from runtime.package.layout import Package
from runtime.package.reader import Reader
from runtime.prepare.training import fit_logistic
from runtime.step import engine
from runtime.step.attention import FusedAttention
from runtime.telemetry.log import RunLog
from tests.runtime_models import PROMPT
from tests.test_runtime_cache import Account

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "runtime" / "package" / "demo_text.txt"
SIZES = DemoSizes(hidden=64, layers=3, experts=8, intermediate=64, vocabulary=512)
HALF = 12 * 3 * 64 * 64 * 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A package with a trained predictor, and what training reported."""
    folder = tmp_path_factory.mktemp("prefetch")
    model = write_demo_model(folder / "model", sizes=SIZES)
    package = convert(model, folder / "package")
    command = [sys.executable, "-m", "moescope", "tune", "predictor", str(package.folder), "--text", str(TEXT), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return package.folder, json.loads(done.stdout)


@pytest.fixture
def package(trained: tuple[Path, dict], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(trained[0], tmp_path / "package"))


def tokens(package: Path, cache: str | int = "all", **options: object) -> tuple[list[int], RunLog]:
    model = MoE.load(package, cache, **options)
    try:
        return [token.id for token in model.generate(PROMPT, 32, ignore_end=True)], model.log
    finally:
        model.close()


def test_training_says_how_good_it_is_and_the_package_stays_whole(trained: tuple[Path, dict]) -> None:
    folder, report = trained
    package = Package(folder)
    assert package.damaged() == []
    assert Predictor.of(package).trained
    assert report["bytes"] < 200_000
    for facts in report["views"].values():
        assert facts["recall"] == sorted(facts["recall"])
        assert facts["recall"][-1] == 1.0, "the widest covers all of eight experts"
        assert sum(row["pairs"] for row in facts["calibration"]) == report["test_tokens"] * 8 * facts["layers"]
    recall = {view: facts["recall"][0] for view, facts in report["views"].items()}
    assert recall["near"] > recall["next"] > 2 / 8, "a random guess finds a quarter"


def test_a_row_of_the_embedding_is_read_without_its_neighbours(package: Path) -> None:
    opened = Package(package)
    table, path = opened.embedding(), opened.folder / opened.manifest["embedding"]["file"]
    address = f"{table.ctypes.data:x}-"
    with Path("/proc/self/smaps").open() as lines:
        described = dropwhile(lambda line: not line.startswith(address), lines)
        assert str(path) in next(described)
        flags = next(line for line in described if line.startswith("VmFlags:")).split()
    assert "rr" in flags, "the kernel reads ahead"


def test_training_again_replaces_the_predictor(package: Path) -> None:
    before = [path.name for path in package.glob("predictor_*")]
    arguments = ["tune", "predictor", str(package), "--text", str(TEXT), "--tokens", "1600"]
    assert main(arguments) == 0
    after = [path.name for path in package.glob("predictor_*")]
    assert len(before) == len(after) == 1
    assert before != after
    assert Package(package).damaged() == []
    assert not list(package.glob("*.partial"))


def test_a_full_disk_leaves_the_package_as_it_was(package: Path) -> None:
    before = {path.name: path.read_bytes() for path in package.iterdir()}
    command = [sys.executable, "-m", "moescope", "tune", "predictor", str(package), "--text", str(TEXT), "--tokens", "800"]
    limit = (1024, 1024)
    refuse = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)  # noqa: E731
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=refuse, timeout=180)
    assert done.returncode == 2
    assert "File too" in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name: path.read_bytes() for path in package.iterdir()} == before


def test_a_damaged_predictor_is_told_with_the_remedy(package: Path) -> None:
    path = next(package.glob("predictor_*"))
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(PackageError, match="predictor_"):
        tokens(package, HALF, prefetch="on")


@pytest.mark.parametrize("policy", ["lru", "lfru"])
def test_prefetched_demanded_and_resident_experts_give_the_same_bits(trained: tuple[Path, dict], policy: str) -> None:
    expected, whole = tokens(trained[0])
    demanded, alone = tokens(trained[0], HALF, prefetch="off", cache_policy=policy)
    prefetched, log = tokens(trained[0], HALF, prefetch="on", cache_policy=policy)
    assert expected == demanded == prefetched
    weights = [b"".join(w.tobytes() for *_, w in one.routing) for one in (whole, alone, log)]
    assert weights[0] == weights[1] == weights[2]
    assert log.loads[Reason.PREFETCH] > 0
    assert log.loads[Reason.PREFETCH] >= log.prefetched > 0
    assert log.resident_bytes <= HALF
    assert alone.loads[Reason.PREFETCH] == alone.prefetched == 0
    assert sum(log.load_bytes.values()) == log.loaded_bytes == sum(log.loads.values()) * 3 * 64 * 64 * 4


@pytest.mark.parametrize("prefetch", ["off", "auto"])
def test_large_experts_are_loaded_on_a_thread_of_their_own_on_demand_too(
    trained: tuple[Path, dict], prefetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, inline = tokens(trained[0], HALF, prefetch="off")
    threads, load = [], Reader.read

    def read(*wanted: object) -> np.ndarray:
        threads.append(current_thread().name)
        return load(*wanted)

    monkeypatch.setattr(Reader, "read", read)
    monkeypatch.setattr(engine, "LARGE_EXPERT", 1)
    text, log = tokens(trained[0], HALF, prefetch=prefetch)
    assert text == expected
    assert any(name.startswith("moescope-load") for name in threads)
    if prefetch == "off":
        assert (log.hits, log.misses, log.prefetched) == (inline.hits, inline.misses, 0)


def test_a_prompt_loads_each_expert_once_and_while_later_rows_attend(
    trained: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    attended, loads, load, attend = [], [], Reader.read, FusedAttention.run

    def read(*wanted: object) -> np.ndarray:
        loads.append((current_thread().name, len(attended)))
        return load(*wanted)

    def run(*wanted: object) -> np.ndarray:
        attended.append(None)
        sleep(0.02)
        return attend(*wanted)

    monkeypatch.setattr(Reader, "read", read)
    monkeypatch.setattr(FusedAttention, "run", run)
    with MoE.load(trained[0], HALF, prefetch="off", chunk=8) as model:
        next(model.generate(list(range(64)), 1, ignore_end=True))
        chosen = {(layer, expert) for _, layer, experts, _ in model.log.routing for expert in np.unique(experts).tolist()}
        assert model.log.loads[Reason.DEMAND] == len(chosen) == model.log.misses
    assert {thread for thread, _ in loads} == {"moescope-load-0"}
    # 64 rows in chunks of 8: a layer's attention has ended with its eighth.
    early = [chunks < 8 * (layer + 1) for (layer, _), (_, chunks) in zip(sorted(chosen), loads, strict=True)]
    assert sum(early) > len(early) / 2


def test_without_training_the_next_router_predicts_and_the_command_that_trains_is_named(
    trained: tuple[Path, dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = convert(trained[0].parent / "model", tmp_path / "package")
    words = ["--prompt", PROMPT, "--max-new-tokens", "2", "--expert-cache", "50%", "--prefetch", "on", "--json"]
    for folder, named in ((package.folder, True), (trained[0], False)):
        assert main(["generate", str(folder), *words]) == 0
        said = capsys.readouterr()
        assert (f"moescope tune predictor {folder} --text" in said.err) == named
        assert ("tune predictor" in json.loads(said.out)["statistics"]["prefetching"]) == named
    expected, _ = tokens(trained[0])
    text, log = tokens(package.folder, HALF, prefetch="on")
    assert text == expected
    assert log.prefetched > 0
    assert tokens(package.folder, HALF)[1].loads[Reason.PREFETCH] == 0, "`auto` waits for training where experts are small"


def test_auto_tries_an_untrained_predictor_for_large_experts(
    trained: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = convert(trained[0].parent / "model", tmp_path / "package")
    monkeypatch.setattr(engine, "LARGE_EXPERT", package.expert_bytes)
    text, log = tokens(package.folder, HALF)
    assert text == tokens(trained[0])[0]
    assert log.loads[Reason.PREFETCH] > 0


@pytest.mark.parametrize("prefetch", ["on", "off"])
def test_a_damaged_expert_ends_in_one_line(package: Path, prefetch: str) -> None:
    for path in package.glob("experts_01.bin"):
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    with pytest.raises(PackageError, match="experts_01"):
        tokens(package, HALF, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", ["on", "off"])
def test_files_removed_while_running_end_in_one_line(package: Path, prefetch: str) -> None:
    model = MoE.load(package, HALF, prefetch=prefetch)
    for path in package.glob("experts_02.bin"):
        path.unlink()
    with pytest.raises(PackageError, match="experts_02"):
        list(model.generate(PROMPT, 8))
    model.close()


def test_control_c_ends_generation_cleanly(trained: tuple[Path, dict]) -> None:
    command = [sys.executable, "-m", "moescope", "generate", str(trained[0]), "--prompt", "A cache", "--ignore-end"]
    command += ["--max-new-tokens", "1000", "--expert-cache", str(HALF), "--prefetch", "on"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"Traceback" not in error


def test_a_load_that_has_not_begun_can_be_cancelled_or_taken_over_and_a_prefetch_counts_as_such() -> None:
    gate, begun, account, loader = Event(), Event(), Account(), ExpertLoader(1)

    def load(form: Form) -> str:
        begun.set()
        assert form.expert != 0 or gate.wait(10)
        return f"session of {form}"

    cache = ExpertCache(60, lambda form: 10, load, account, LRU(), loader)
    cache.begin_event()
    forms = [Form(0, expert, 1, 0) for expert in range(3)]
    assert all(cache.prefetch(form, 1.0) for form in forms)
    assert begun.wait(10)
    assert not cache.cancel(forms[0]), "it is being read"
    assert cache.cancel(forms[1])
    assert forms[1] not in cache
    cache.name(forms[2:])
    assert cache.state(forms[2]) is Cache.MISS, "it was asked for early, and was not there in time"
    assert cache.acquire(forms[2]) == f"session of {forms[2]}", "taken over, while the thread still reads the first"
    cache.release(forms[2])
    gate.set()
    cache.settle()
    cache.begin_event()
    cache.name(forms[:1])
    assert cache.state(forms[0]) is Cache.PREFETCHED
    assert (cache.hits, cache.misses, cache.prefetched, account.loads) == (1, 1, 1, 2)
    loader.close()


def test_what_is_asked_for_comes_before_the_rest_of_a_prefetch_that_is_being_read() -> None:
    loader, pieces, order = ExpertLoader(1), Event(), []
    asked = Event()

    def read(name: str) -> None:
        if name == "prefetch":
            pieces.set()
            assert asked.wait(10)
        loader.yield_to_urgent()
        order.append(name)

    early, late, more = (
        Ticket(1.0, lambda: read("prefetch")),
        Ticket(URGENT, lambda: read("demand")),
        Ticket(0.5, lambda: read("more")),
    )
    loader.submit(early)
    assert pieces.wait(10)
    loader.submit(more)
    loader.submit(late)
    loader.yield_to_urgent()
    assert not order, "it is the loading thread that gives way, nobody else"
    asked.set()
    for ticket in (early, late, more):
        ticket.result(10)
    assert order == ["demand", "prefetch", "more"]
    loader.close()


def test_chances_are_calibrated_on_what_they_were_fitted_to() -> None:
    random = np.random.default_rng(0)
    margin = random.standard_normal(20_000) * 2
    chosen = (random.random(20_000) < 1 / (1 + np.exp(-(1.7 * margin - 0.4)))).astype(float)
    assert np.allclose(fit_logistic(margin, chosen), [1.7, -0.4], atol=0.1)
    scores = random.standard_normal((50, 9)).astype(np.float32)
    ranked = probability_of(log_odds(scores, 3, np.array([1.0, 0.0])))
    assert ((ranked > 0.5).sum(1) == 3).all(), "with an even curve, half marks the border of k"


def test_while_all_loading_threads_are_busy_only_likelier_experts_are_loaded() -> None:
    gate, loader = Event(), ExpertLoader(1)
    cache = ExpertCache(60, lambda form: 10, lambda form: gate.wait(10), Account(), LRU(), loader)
    told = np.full((1, 3), -np.inf)

    class Fixed:
        def tokens(self, embedded: np.ndarray, history: History) -> None:
            return None

        def ahead(self, layer: int, hidden: np.ndarray) -> list[np.ndarray]:
            return [told[0]]

    family = SimpleNamespace(layers=1, experts=3, top_k=1, routed=[0])
    listener, row = Prefetcher(Fixed(), cache, family, 1), np.zeros((1, 4), np.float32)
    listener.step_begins(row)
    middle = (log_odds_of(SPARE) + log_odds_of(SCARCE)) / 2
    told[0, 0] = middle
    listener.layer_begins(0, row)
    assert [form.expert for form in cache.forms()] == [0]
    assert cache.busy
    told[0] = middle, middle, log_odds_of(SCARCE) + 0.1
    listener.layer_begins(0, row)
    assert [form.expert for form in cache.forms()] == [0, 2]
    gate.set()
    cache.settle()
    loader.close()


def test_time_inside_graphs_is_a_part_of_the_steps(trained: tuple[Path, dict]) -> None:
    _, log = tokens(trained[0])
    assert 0 < sum(log.graph_ns.values()) < sum(step.duration_ns for step in log.steps)
    assert {kind for kind, _ in log.graphs} == set(log.graph_ns)
