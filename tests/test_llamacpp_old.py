"""Packages of llama.cpp as it was in 2025 are traced as rightly as today's, by what they tell themselves."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests import test_llamacpp_truth as truth
from tests.conftest import OLD_PACKAGES, made_once, old_package
from workloads.gguf_model import SMALL

pytestmark = [pytest.mark.long, pytest.mark.needs("probes", "old packages")]

GROWING = [300, 1, 7]
"""In graphs of 128: what these builds read of the cache is longer in each of them, and they tell it of the same nodes."""


@pytest.mark.parametrize("package", OLD_PACKAGES)
def test_a_package_of_then_is_told_step_by_step(tmp_path: Path, package: str) -> None:
    """Its graph loop is learnt too: in 0.2.0 it keeps its variables far up in a large frame, and tokens have no name."""
    library = next(made_once(package, old_package(package)).rglob("xllamacpp.cpython*.so"))
    both = truth.Both(tmp_path, truth.Run([GROWING], replace(SMALL, layers=1), part=128, library=str(library)))
    truth.test_every_step_has_its_batchs_tokens_in_as_many_graphs_as_they_fill(both)
    truth.test_every_token_is_routed_to_the_experts_that_llama_cpp_used(both)
    assert [both.traced(step) for step in range(len(both.place))] == [both.computed(step) for step in range(len(both.place))]
    assert both.learnt()
