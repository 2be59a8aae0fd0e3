"""The engine against transformers: the same tokens, the same logits."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from runtime import MoE
from runtime.cache_rules.forms import CPU, Form, Reason
from runtime.package.demo_model import write_demo_model
from tests.conftest import rest_long
from tests.runtime_models import PROMPT, fuse_experts, random_model, shard, trained_model, trained_package

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from workloads import drawn_models  # noqa: E402  (needs both)

NEW = 40
torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]


def assert_parity(folder: Path, target: Path, **options: Any) -> MoE:
    engine = MoE.load(folder, package=target, **options)
    ids = engine.encode(PROMPT)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected, expected_logits = drawn_models.greedy_reference(model, ids, NEW)
    tokens, logits = drawn_models.greedy_tokens(engine, ids, NEW)
    assert tokens == expected
    assert np.abs(logits - expected_logits).max() < 1e-3 * max(1.0, float(np.abs(expected_logits).max()))
    engine.close()
    return engine


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False, "num_key_value_heads": 4},
        {"tie_word_embeddings": True, "head_dim": 16, "num_key_value_heads": 1},
        {"attention_bias": True, "num_experts_per_tok": 1},
    ],
    ids=["no-renorm", "tied", "bias"],
)
def test_greedy_text_of_a_random_model_equals_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    assert_parity(random_model(tmp_path, **changes), tmp_path / "package", chunk=16)


def test_greedy_text_of_the_demo_model_equals_transformers(tmp_path: Path) -> None:
    assert_parity(write_demo_model(tmp_path), tmp_path / "package")


def test_greedy_text_of_the_trained_model_equals_transformers() -> None:
    assert_parity(trained_model(), trained_package(), chunk=7)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_checkpoint_in_half_precision_is_read_exactly(tmp_path: Path, precision: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    folder = random_model(tmp_path)
    dtype = np.float16 if precision == "float16" else ml_dtypes.bfloat16
    tensors = {name: tensor.astype(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert_parity(folder, tmp_path / "package")


def test_fused_sharded_and_plain_checkpoints_give_the_same_text(tmp_path: Path) -> None:
    folder = random_model(tmp_path)
    plain = [token.id for token in MoE.load(folder, package=tmp_path / "a").generate(PROMPT, NEW)]
    fuse_experts(folder)
    fused = [token.id for token in MoE.load(folder, package=tmp_path / "b").generate(PROMPT, NEW)]
    shard(folder)
    sharded = [token.id for token in MoE.load(folder, package=tmp_path / "c").generate(PROMPT, NEW)]
    assert plain == fused == sharded


def test_a_small_expert_cache_changes_no_token_and_the_log_adds_up(tmp_path: Path) -> None:
    folder = write_demo_model(tmp_path)
    whole = MoE.load(folder)
    small = MoE.load(folder, expert_cache="1.2MiB", chunk=5)
    expected = [token.id for token in whole.generate(PROMPT, NEW)]
    assert [token.id for token in small.generate(PROMPT, NEW)] == expected
    log = small.log
    assert log.resident_bytes <= 1.2 * (1 << 20)
    assert (log.loads[Reason.DEMAND] - log.evictions) * small.engine.experts.bytes_of(Form(0, 0, CPU, 0)) == log.resident_bytes
    assert log.hits > 0
    decode = [experts.size for seq, _, experts, _ in log.routing if seq > 0]
    assert sum(log.expert_runs.values()) >= sum(decode)
    assert whole.log.misses == 0


def test_a_graph_on_two_threads_gives_the_same_text(tmp_path: Path) -> None:
    script = "import sys; from runtime import MoE\n"
    script += (
        f"print([t.id for t in MoE.load({str(write_demo_model(tmp_path))!r}, threads=int(sys.argv[1])).generate({PROMPT!r}, 24)])"
    )
    run = [[sys.executable, "-c", script, threads] for threads in ("1", "2")]
    out = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for command in run]
    assert out[0] == out[1]


def test_evicted_experts_give_their_memory_back(tmp_path: Path) -> None:
    folder = random_model(tmp_path, hidden_size=128, moe_intermediate_size=256, num_hidden_layers=3, num_experts=12)
    engine = MoE.load(folder, expert_cache="2MiB")
    list(engine.generate(PROMPT, 4))
    before = proportional_bytes()
    loaded = engine.log.loaded_bytes
    list(engine.generate(PROMPT, 24))
    gc.collect()
    assert engine.log.loaded_bytes - loaded > 20 << 20, "the test must move far more than it may keep"
    assert proportional_bytes() - before < 6 << 20


def proportional_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024


def test_the_same_seed_draws_the_same_text_and_another_seed_another(tmp_path: Path) -> None:
    model = MoE.load(write_demo_model(tmp_path))
    texts = [
        "".join(t.text for t in model.generate(PROMPT, 24, temperature=0.9, top_k=40, top_p=0.95, seed=s)) for s in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_streamed_text_joins_to_the_decoded_whole(tmp_path: Path) -> None:
    model = MoE.load(write_demo_model(tmp_path))
    tokens = list(model.generate("naïve 中文 🙂", 60, temperature=1.5, seed=5, ignore_end=True))
    whole = model.tokenizer.decode([token.id for token in tokens])
    assert "".join(token.text for token in tokens) == whole


def test_generation_stops_at_the_end_token(tmp_path: Path) -> None:
    model = MoE.load(write_demo_model(tmp_path))
    first = [token.id for token in model.generate(PROMPT, 8)]
    model.end_ids = frozenset((first[3],))
    assert [token.id for token in model.generate(PROMPT, 8)] == first[: first.index(first[3])]


@pytest.mark.parametrize("family", rest_long(drawn_models.FAMILIES, *[*drawn_models.FAMILIES][::2]))
def test_a_drawn_config_of_every_family_equals_transformers(family: str) -> None:
    agreed = drawn_models.compare_prompts(family, seed=1000, new=24, prompts=(1, 16, 65))
    assert agreed.equal == agreed.tokens == 72
    assert agreed.share < 1
