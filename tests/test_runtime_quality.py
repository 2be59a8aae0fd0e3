"""What short weights and short keys cost: perplexity of the trained model on text it has not seen."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import negative_log_likelihoods, windows
from runtime import MoE
from runtime.attention import Sequence
from runtime.convert import Target, convert
from runtime.kv_cache import TYPES
from runtime.package import Package
from tests.runtime_models import trained_model

TOKENS, WINDOW = 512, 256


def text() -> str:
    path = trained_model().parent / "text" / "test.txt"
    if not path.exists():
        pytest.skip("no text of the trained model at hand")
    return path.read_text(encoding="utf-8")[: TOKENS * 8]


def perplexity(package: Path, **options: int) -> float:
    model = MoE.load(package, **options)
    ids = model.encode(text())[:TOKENS]
    losses = np.concatenate([negative_log_likelihoods(model, part) for part in windows(ids, WINDOW)])
    model.close()
    return float(np.exp(losses.mean()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(trained_model(), tmp_path_factory.mktemp("plain") / "package", None, Target(backend="cpu")).folder


def test_perplexity_stays_within_its_bounds(plain: Path, tmp_path: Path) -> None:
    best = perplexity(plain)
    for bits, bound in ((8, 0.01), (4, 0.05)):
        package = convert(trained_model(), tmp_path / str(bits), None, Target(backend="cpu", bits=bits)).folder
        assert abs(perplexity(package) / best - 1) < bound, bits
    for kv_bits in (16, 8):
        assert abs(perplexity(plain, kv_bits=kv_bits) / best - 1) < 0.01, kv_bits


def test_shorter_keys_and_values_take_less_memory(plain: Path) -> None:
    family = Package(plain).family
    sizes = {bits: sum(map(len, map(bytes, Sequence(family, 128, TYPES[bits]).keys))) for bits in (32, 16, 8)}
    assert sizes[32] == 2 * sizes[16] == 4 * sizes[8]
