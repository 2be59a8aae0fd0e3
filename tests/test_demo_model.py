"""The demo model: the same bytes for a seed, loadable by transformers, worth watching."""

from collections import Counter
from pathlib import Path

import pytest

from runtime import MoE
from runtime.package.demo_model import write_demo_model


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_seed_decides_every_byte(tmp_path: Path) -> None:
    first, again, other = (write_demo_model(tmp_path / str(i), seed) for i, seed in enumerate((0, 0, 1)))
    assert content(first) == content(again)
    assert content(first)["model.safetensors"] != content(other)["model.safetensors"]
    assert sum(map(len, content(first).values())) < 8 << 20


def test_its_greedy_text_is_varied_and_every_expert_is_chosen(tmp_path: Path) -> None:
    model = MoE.load(write_demo_model(tmp_path))
    for prompt in ("The router looks at the token and", "A cache keeps", "Numbers need company."):
        ids = [token.id for token in model.generate(prompt, 32, ignore_end=True)]
        assert len(set(ids)) >= 10, prompt
    used: Counter[tuple[int, int]] = Counter()
    for _, layer, experts, _ in model.log.routing:
        used.update((layer, expert) for expert in experts.ravel().tolist())
    assert len(used) == 4 * 8
    assert max(used.values()) < 4 * sum(used.values()) / len(used)


def test_transformers_reads_its_tokenizer_the_same_way(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_demo_model(tmp_path)
    text = "A probe is a place in the program; naïve 中文."
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    model = MoE.load(folder)
    assert model.encode(text) == ids
    assert model.tokenizer.decode(ids) == text
