"""Sampling, log probabilities and perplexity, with transformers as the oracle."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moescope.__main__ import main
from runtime import MoE
from runtime.errors import RequestError
from runtime.package.demo_model import TEXT, write_demo_model
from runtime.step.sampling import Sampler, Sampling
from tests.conftest import made_once
from tests.runtime_models import PROMPT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def demo() -> Path:
    return made_once("sampling-demo", write_demo_model)


@given(
    seed=st.integers(0, 10**6),
    seen=st.lists(st.integers(0, 39), max_size=8),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
    penalty=st.floats(0.5, 2),
)
@settings(deadline=None)
def test_chances_are_those_of_the_logits_processors_of_transformers(
    seed: int, seen: list[int], temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, 40).astype(np.float32)
    ids = [*seen, 0]
    sampling = Sampling(temperature, top_k, top_p, min_p=min_p, repetition_penalty=penalty)
    chosen, chances = Sampler(sampling, ids).candidates(logits)
    processors = [transformers.RepetitionPenaltyLogitsProcessor(penalty), transformers.TemperatureLogitsWarper(temperature)]
    processors += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    processors += [transformers.TopPLogitsWarper(top_p), transformers.MinPLogitsWarper(min_p)]
    scores = torch.tensor(logits.astype(np.float64))[None]
    for processor in processors:
        scores = processor(torch.tensor([ids]), scores)
    expected = torch.softmax(scores[0], -1).numpy()
    ours = np.zeros(40)
    ours[chosen] = chances
    assert ours == pytest.approx(expected, abs=1e-6)


def test_a_penalty_and_log_probabilities_are_those_of_transformers(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(demo).eval()
    with MoE.load(demo) as moe:
        ids = moe.encode(PROMPT)
        tokens = list(moe.generate(ids, 12, repetition_penalty=1.4, ignore_end=True, logprobs=3))
    feed = torch.tensor([ids])
    out = model.generate(feed, max_new_tokens=12, min_new_tokens=12, do_sample=False, repetition_penalty=1.4, pad_token_id=0)
    with torch.no_grad():
        logs = torch.log_softmax(model(out[:, :-1]).logits[0, len(ids) - 1 :], -1)
    assert [token.id for token in tokens] == out[0, len(ids) :].tolist()
    assert [token.logprob for token in tokens] == pytest.approx(
        [float(row[t.id]) for row, t in zip(logs, tokens, strict=True)], abs=1e-3
    )
    for row, token in zip(logs, tokens, strict=True):
        assert [value for _, value in token.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
        assert [value for _, value in token.top] == pytest.approx([float(row[i]) for i, _ in token.top], abs=1e-3)
    arguments = ["generate", str(demo), "--prompt", PROMPT, "--max-new-tokens", "2", "--json", "--logprobs", "1"]
    assert main([*arguments, "--repetition-penalty", "1.4", "--ignore-end"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [entry["logprob"] for entry in told["logprobs"]] == [token.logprob for token in tokens[:2]]


@pytest.mark.parametrize(("window", "stride"), [(64, 32), (48, 47), (512, 100)])
def test_perplexity_is_that_of_transformers_in_the_same_windows(
    demo: Path, window: int, stride: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = transformers.AutoModelForCausalLM.from_pretrained(demo).eval(), TEXT.read_text(encoding="utf-8")[:1500]
    ids = transformers.AutoTokenizer.from_pretrained(demo)(text)["input_ids"]
    lost, counted, first = [], 1, -stride
    while counted < len(ids):
        first += stride
        part = torch.tensor(ids[first : first + window])
        with torch.no_grad():
            logs = torch.log_softmax(model(part[None]).logits[0].double(), -1)
        lost += [-float(logs[i - 1, part[i]]) for i in range(counted - first, len(part))]
        counted = first + len(part)
    assert len(lost) == len(ids) - 1
    (tmp_path / "text").write_text(text)
    arguments = [
        "bench",
        "perplexity",
        str(demo),
        "--text",
        str(tmp_path / "text"),
        "--window",
        str(window),
        "--stride",
        str(stride),
    ]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tokens"], told["perplexity"]) == (len(lost), pytest.approx(np.exp(np.mean(lost)), rel=1e-4))
    assert told["error"] == pytest.approx(told["perplexity"] * np.std(lost) / len(lost) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": -0.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
        {"seed": -1},
        {"temperature": float("nan")},
        {"top_p": float("nan")},
        {"logprobs": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused(demo: Path, wrong: dict[str, float]) -> None:
    with MoE.load(demo) as moe, pytest.raises(RequestError):
        moe.generate(PROMPT, 1, **wrong)


@pytest.mark.parametrize("ids", [[], [1.5], [[1, 2]], np.zeros((1, 3), int), [None], ["a"]])
def test_a_prompt_that_is_none_is_refused(demo: Path, ids: list[int]) -> None:
    with MoE.load(demo) as moe, pytest.raises(RequestError, match="prompt"):
        moe.generate(ids, 1)


def test_ids_come_as_lists_arrays_and_tensors(demo: Path) -> None:
    with MoE.load(demo) as moe:
        told = [[t.id for t in moe.generate(ids, 3)] for ids in ([5, 9], (5, 9), np.array([5, 9]), torch.tensor([5, 9]))]
    assert told == [told[0]] * 4


@pytest.mark.parametrize(
    "arguments", [["--window", "1"], ["--stride", "0"], ["--stride", "512"], ["--window", "2000"], ["--tokens", "1"]]
)
def test_windows_that_make_no_sense_are_refused(demo: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["bench", "perplexity", str(demo), "--text", str(TEXT), *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("temperature", [1e-10, 1e-320])
def test_at_a_temperature_near_zero_only_the_most_likely_tokens_are_possible(temperature: float) -> None:
    ids, chances = Sampler(Sampling(temperature)).candidates(np.array([1, 3, 2, 3], np.float32))
    assert (ids.tolist(), chances.tolist()) == ([1, 3], [0.5, 0.5])
