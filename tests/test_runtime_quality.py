"""What 8-bit weights and 8-bit keys cost: perplexity of the trained model on new text (benchmarks.quality has more)."""

from pathlib import Path

import pytest

from runtime import MoE
from runtime.backends.kv_cache import TYPES
from runtime.package.convert import PackageFormat, convert
from runtime.package.layout import Package
from runtime.prepare.perplexity import Perplexity, token_losses
from runtime.step.attention import Sequence
from tests.runtime_models import trained_model, trained_package

TOKENS, WINDOW = 256, 256


def text() -> str:
    path = trained_model().parent / "text" / "test.txt"
    if not path.exists():
        pytest.skip("no text of the trained model at hand")
    return path.read_text(encoding="utf-8")[: TOKENS * 8]


def perplexity(package: Path, **options: int) -> float:
    model = MoE.load(package, **options)
    ids = model.encode(text())[:TOKENS]
    found = Perplexity.of(token_losses(model.engine, ids, WINDOW, WINDOW - 1))
    model.close()
    return found.perplexity


def test_perplexity_stays_within_its_bounds(tmp_path: Path) -> None:
    plain = trained_package()
    best = perplexity(plain)
    package = convert(trained_model(), tmp_path / "package", None, PackageFormat(backend="cpu", bits=8)).folder
    assert abs(perplexity(package) / best - 1) < 0.01
    assert abs(perplexity(plain, kv_bits=8) / best - 1) < 0.01


def test_shorter_keys_and_values_take_less_memory() -> None:
    family = Package(trained_package()).family
    sizes = {bits: sum(map(len, map(bytes, Sequence(family, 128, TYPES[bits]).keys))) for bits in (32, 16, 8)}
    assert sizes[32] == 2 * sizes[16] == 4 * sizes[8]
