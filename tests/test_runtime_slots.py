"""The expert cache of decoded tokens, kept in C: its hits are those of the rule's replay, its experts those that were read."""

import os
from pathlib import Path

import numpy as np
import pytest

from runtime import MoE
from runtime.cache_rules.eviction import POLICIES
from runtime.cache_rules.forms import CPU, Form, Reason
from runtime.cache_rules.replay import Event, replay
from runtime.errors import PackageError
from runtime.moe import Package
from runtime.package.convert import PackageFormat, convert
from runtime.step import engine
from runtime.telemetry import probes
from runtime.telemetry.log import RunLog
from tests.runtime_models import PROMPT, random_model

pytestmark = pytest.mark.skipif(not probes.built, reason="runtime/telemetry/_probes.so is not built: run make")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slots")
    return convert(random_model(folder, num_experts=12, num_hidden_layers=3), folder / "package").folder


def routed_events(log: RunLog) -> list[Event]:
    """Each layer of each step; of rows together, in order of the experts' numbers."""
    return [
        Event(tuple(Form(layer, int(e), CPU, 0) for e in (experts[0] if len(experts) == 1 else np.unique(experts))))
        for _, layer, experts, _ in log.routing
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("held", "large"), [(4, 1), (9, 1), (17, 1), (9, 1 << 20)])
def test_hits_and_loads_of_decoded_tokens_are_those_of_the_replay(
    package: Path, policy: str, held: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LARGE_EXPERT", large)
    size = Package(package).expert_bytes
    with MoE.load(package, held * size + 7, prefetch="off", cache_policy=policy) as model:
        list(model.generate([1], 40, ignore_end=True))
        expected = replay(routed_events(model.log), held, POLICIES[policy]())
        assert (model.log.hits, model.log.misses) == (expected.hits, expected.misses)
        assert sum(model.log.loads.values()) == expected.reads
        assert model.log.resident_bytes == min(held, sum(model.log.loads.values())) * size
        assert model.log.resident_bytes == (sum(model.log.loads.values()) - model.log.evictions) * size


def test_prompts_and_tokens_hand_the_same_experts_to_each_other(package: Path) -> None:
    size = Package(package).expert_bytes
    with MoE.load(package) as whole, MoE.load(package, 36 * size, prefetch="off") as enough:
        for prompt in (PROMPT, "Another one", PROMPT):
            expected = [token.id for token in whole.generate(prompt, 12, ignore_end=True)]
            assert [token.id for token in enough.generate(prompt, 12, ignore_end=True)] == expected
        used = {(layer, int(e)) for _, layer, experts, _ in enough.log.routing for e in experts.flat}
        assert sum(enough.log.loads.values()) == len(used), "what is in memory is never read again"
        assert enough.log.evictions == 0


def foretold(folder: Path, added: float) -> MoE:
    """A model whose layers add so much to their state that what they choose is known before, or is not; half of it in memory."""
    import torch
    from safetensors.torch import load_file, save_file

    model = random_model(folder, num_experts=12, num_hidden_layers=4)
    tensors = load_file(model / "model.safetensors")
    scaled = {
        name: tensor * added if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor
        for name, tensor in tensors.items()
    }
    save_file({name: tensor.to(torch.float32) for name, tensor in scaled.items()}, model / "model.safetensors", {"format": "pt"})
    package = convert(model, folder / "package")
    return MoE.load(package.folder, 24 * package.expert_bytes, prefetch="on")


@pytest.mark.parametrize(("added", "least", "most"), [(0.001, 0.8, 1.0), (30.0, 0.0, 0.5)])
def test_what_is_read_ahead_is_what_layers_choose_as_far_as_that_can_be_known(
    tmp_path: Path, added: float, least: float, most: float
) -> None:
    with foretold(tmp_path, added) as model:
        list(model.generate([1], 100, temperature=1, ignore_end=True))
        ahead, loads = model.log.loads[Reason.PREFETCH], sum(model.log.loads.values())
        expected = replay(routed_events(model.log), 24, POLICIES["lru"]())
        assert least <= ahead / loads <= most
        assert loads <= 1.3 * expected.reads, "what is wrong is read, too"


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_survive_a_prompt_between_tokens(package: Path, policy: str) -> None:
    size = Package(package).expert_bytes
    with MoE.load(package, 15 * size, prefetch="off", cache_policy=policy) as model:
        for token in (1, 2, 3):
            list(model.generate([token], 9, ignore_end=True))
        expected = replay(routed_events(model.log), 15, POLICIES[policy]())
        assert (model.log.hits, model.log.misses) == (expected.hits, expected.misses)


def test_experts_of_sixteen_bits_are_widened_where_they_were_read(tmp_path: Path) -> None:
    folder = convert(random_model(tmp_path), tmp_path / "package", None, PackageFormat(backend="cpu", bits=16)).folder
    size = Package(folder).expert_bytes
    with MoE.load(folder) as whole, MoE.load(folder, 12 * size, prefetch="off") as small:
        expected = [token.id for token in whole.generate(PROMPT, 24, ignore_end=True)]
        assert [token.id for token in small.generate(PROMPT, 24, ignore_end=True)] == expected
        assert small.log.evictions > 0


def test_a_file_that_ends_early_while_tokens_are_decoded_is_named(package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "package"
    copy.mkdir()
    for file in package.iterdir():
        os.link(file, copy / file.name) if not file.name.startswith("experts_") else (copy / file.name).write_bytes(
            file.read_bytes()
        )
    size = Package(copy).expert_bytes
    with MoE.load(copy, 4 * size, prefetch="off") as model:
        tokens = model.generate([1], 40, ignore_end=True)
        next(tokens)
        next(tokens)
        for file in copy.glob("experts_*"):
            os.truncate(file, 100)
        with pytest.raises(PackageError, match=r"experts_0[0-2]\.bin ends early"):
            list(tokens)
