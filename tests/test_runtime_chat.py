"""Conversations and generation settings as transformers reads them; one model in several hands."""

import gc
import io
import json
import re
import tracemalloc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moescope.__main__ import main
from runtime import MoE
from runtime.errors import ModelError, RequestError
from runtime.models import read_family
from runtime.moe import TextStream, Token
from runtime.package.convert import convert
from runtime.package.demo_model import write_demo_model
from runtime.package.tokens import ChatTemplate, read_tokenizer
from runtime.step.attention import Sequence
from runtime.step.sampling import Sampler, Sampling
from runtime.telemetry import log
from runtime.telemetry.log import Step
from runtime.telemetry.probes import Phase
from tests.golden import Golden
from tests.runtime_models import PROMPT

CONVERSATION = [
    {"role": "system", "content": "Be <brief> & 'clear'."},
    {"role": "user", "content": "Caché?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why"},
]
TEMPLATES = {
    "date": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "tokens": "{{ bos_token }}{{ unk_token }}{{ pad_token }}{{ messages[0].content }}{{ eos_token }}",
    "json": "{{ messages | tojson }}",
}
SPECIAL = {
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>"},
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_demo_model(tmp_path / "model")


def change(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_conversations_become_the_ids_of_transformers(model: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    change(model / "tokenizer_config.json", chat_template=template, tokenizer_class="PreTrainedTokenizerFast", **SPECIAL)
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    expected = theirs.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=False)
    assert ChatTemplate(model).ids(CONVERSATION) == expected


CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "Wer trägt 東京 🗼?"}],
    "system": [{"role": "system", "content": "Be <brief> & 'clear'."}, {"role": "user", "content": "  Caché?\n"}],
    "turns": [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nB."},
        {"role": "user", "content": "Γ"},
        {"role": "assistant", "content": "D"},
        {"role": "user", "content": "E"},
    ],
    "system and turns": CONVERSATION,
}
PUBLISHED = sorted((Path(__file__).parent / "data" / "chat_templates").glob("*.jinja"))
CONTROL = re.compile(r"<[|\uff5c][^|\uff5c>\n]+[|\uff5c]>|</?s>|\[/?[A-Z_]+\]|</?think>")


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_templates_of_published_models_give_the_ids_of_transformers(model: Path, path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = path.read_text(encoding="utf-8")
    tokenizer = read_tokenizer(model)
    tokenizer.add_special_tokens(sorted(set(CONTROL.findall(template))))
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    (model / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    ours, theirs = ChatTemplate(model), transformers.AutoTokenizer.from_pretrained(model)
    for conversation in CONVERSATIONS.values():
        for options in ({}, {"add_generation_prompt": False}, {"enable_thinking": False}):
            asked = {"add_generation_prompt": True} | options
            expected = theirs.apply_chat_template(conversation, return_dict=False, **asked)
            assert ours.ids(conversation, **options) == expected
            assert conversation[-1]["content"].strip() in tokenizer.decode(expected)


TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.mark.parametrize(
    ("template", "thinking", "effort", "expected"),
    [
        ("Qwen-Qwen3-0.6B", False, None, {"enable_thinking": False}),
        ("GLM-4.6", False, None, {"enable_thinking": False}),
        ("deepseek-ai-DeepSeek-V3.1", True, None, {"thinking": True}),
        ("openai-gpt-oss-120b", None, "high", {"reasoning_effort": "high"}),
        ("Qwen3-Coder", True, None, None),
        ("Qwen3-Coder", None, "low", None),
    ],
)
def test_options_reach_the_template_by_the_names_that_it_reads(
    model: Path, template: str, thinking: bool | None, effort: str | None, expected: dict | None
) -> None:
    transformers = pytest.importorskip("transformers")
    path = next(path for path in PUBLISHED if path.stem == template)
    (model / "chat_template.jinja").write_bytes(path.read_bytes())
    ours, theirs = ChatTemplate(model), transformers.AutoTokenizer.from_pretrained(model)
    if expected is None:
        with pytest.raises(RequestError):
            ours.variables(thinking, effort, None)
        return
    messages = [{"role": "user", "content": "Why"}]
    asked = {"add_generation_prompt": True, "return_dict": False}
    told = ours.ids(messages, **ours.variables(thinking, effort, TOOLS if "tools" in path.read_text() else None))
    tools = TOOLS if "tools" in path.read_text() else None
    assert told == theirs.apply_chat_template(messages, tools=tools, **expected, **asked)
    assert told != theirs.apply_chat_template(messages, tools=tools, **asked), "the option changes the prompt"


def test_generate_answers_a_file_of_messages_as_transformers_would_ask(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    (model / "chat_template.jinja").write_bytes(next(path for path in PUBLISHED if path.stem == "Qwen3.5-4B").read_bytes())
    for name, content in (("messages", CONVERSATION), ("tools", TOOLS), ("wrong", {"role": "user"})):
        (tmp_path / name).write_text(json.dumps(content))
    options = ["--max-new-tokens", "6", "--json", "--thinking", "off", "--tools", str(tmp_path / "tools")]
    assert main(["generate", str(model), "--messages", str(tmp_path / "messages"), *options]) == 0
    found = json.loads(capsys.readouterr().out)["tokens"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template(
        CONVERSATION, tools=TOOLS, enable_thinking=False, add_generation_prompt=True, return_dict=False
    )
    with MoE.load(model) as loaded:
        assert found == [token.id for token in loaded.generate(list(ids), 6)]
    assert main(["generate", str(model), "--messages", str(tmp_path / "wrong")]) == 2
    assert main(["generate", str(model), "--prompt", "a", "--thinking", "on"]) == 2


def test_a_talk_in_channels_shows_and_keeps_the_final_one_alone(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    template = next(path for path in PUBLISHED if "gpt-oss" in path.name).read_text(encoding="utf-8")
    tokenizer = read_tokenizer(model)
    tokenizer.add_special_tokens(sorted(set(CONTROL.findall(template))))
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    whole = "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Guten Tag, 東京!"
    cut = "<|channel|>analysis<|message|>Hm, what"
    prompts = []

    def generate(self: MoE, prompt: list[int], **_: object) -> Iterator[Token]:
        prompts.append(prompt)
        stream = TextStream(self.tokenizer)
        for token in tokenizer.encode(cut if len(prompts) == 3 else whole, add_special_tokens=False).ids:
            yield Token(token, stream.add(token), Step(0, Phase.DECODE, 1, 0))

    monkeypatch.setattr(MoE, "generate", generate)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAgain\nMore\n"))
    assert main(["chat", str(convert(model, tmp_path / "package").folder)]) == 0
    out, error = capsys.readouterr()
    assert out == "Guten Tag, 東京!\nGuten Tag, 東京!\n\n"
    assert error.endswith("--max-new-tokens\n")
    theirs, talk = transformers.AutoTokenizer.from_pretrained(model), []
    for line, prompt in zip(("Hello", "Again", "More"), prompts, strict=True):
        talk.append({"role": "user", "content": line})
        assert prompt == theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
        talk.append({"role": "assistant", "content": "Guten Tag, 東京!", "thinking": "A greeting."})


def test_a_template_that_refuses_a_conversation_is_quoted_in_one_line(model: Path) -> None:
    change(model / "tokenizer_config.json", chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(RequestError, match="no system role"):
        ChatTemplate(model).ids(CONVERSATION)
    change(model / "tokenizer_config.json", chat_template="{{ 1 + messages[0].content }}")
    with pytest.raises(RequestError):
        ChatTemplate(model).ids(CONVERSATION)


def test_the_first_token_is_not_doubled_where_template_and_tokenizer_both_add_it(model: Path) -> None:
    from tokenizers import processors

    tokenizer = read_tokenizer(model)
    tokenizer.add_special_tokens(["<s>"])
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    tokenizer.save(str(model / "tokenizer.json"))
    change(model / "tokenizer_config.json", chat_template="{{ bos_token }}{{ messages[0].content }}", bos_token="<s>")
    assert tokenizer.encode("Hello").ids[0] == first
    assert ChatTemplate(model).ids([{"role": "user", "content": "Hello"}]).count(first) == 1


def test_end_tokens_of_generation_config_end_an_answer_and_go_into_the_package(model: Path, tmp_path: Path) -> None:
    with MoE(convert(model, tmp_path / "first"), MoE.load(tmp_path / "first").options) as plain:
        ids = [token.id for token in plain.generate(PROMPT, 8, ignore_end=True)]
    change(model / "generation_config.json", eos_token_id=[ids[3]])
    package = convert(model, tmp_path / "second").folder
    with MoE.load(package) as ended:
        assert [token.id for token in ended.generate(PROMPT, 8)] == ids[: ids.index(ids[3])]
    assert "generation_config.json" in json.loads((package / "manifest.json").read_text())["files"]


def test_threads_and_abandoned_generators_leave_every_answer_right(model: Path) -> None:
    prompts = [PROMPT, "A cache keeps", "Experts", PROMPT[:30]] * 5
    with MoE.load(model) as moe:

        def answer(prompt: str) -> list[int]:
            return [token.id for token in moe.generate(prompt, 8, ignore_end=True)]

        expected = [answer(prompt) for prompt in prompts]
        abandoned = moe.generate(PROMPT, 8)
        next(abandoned)
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(answer, prompts)) == expected
        del abandoned
        assert answer(prompts[1]) == expected[1]


@pytest.mark.parametrize("kv_bits", [32, 16, 8])
def test_a_prompt_that_begins_as_the_last_one_computes_the_rest_alone_and_says_the_same(model: Path, kv_bits: int) -> None:
    first = [token % 1000 for token in range(90)]
    with MoE.load(model, kv_bits=kv_bits) as moe, MoE.load(model, kv_bits=kv_bits) as anew:

        def answer(who: MoE, ids: list[int], new: int = 6, **options: bool) -> list[int]:
            return [token.id for token in who.generate(ids, new, ignore_end=True, **options)]

        turn = [*first, *answer(moe, first, keep_kv=True), 17, 18]
        branch, long = [*turn[:50], 5, 6, 7], turn * 4
        # Computed: what follows the common beginning; of a prompt that is known as a whole, its last token.
        for ids, computed in ((turn, 3), (turn, 1), (branch, 3), (long, len(long) - 50), (first, 1)):
            steps = len(moe.log.steps)
            assert answer(moe, ids, keep_kv=True) == answer(anew, ids)
            prefill, *decoded = moe.log.steps[steps:]
            assert (prefill.phase, prefill.n_tokens, prefill.position) == (Phase.PREFILL, computed, len(ids) - computed)
            assert len(decoded) == 5 and all(step.phase == Phase.DECODE for step in decoded)
        abandoned = moe.generate(long, 6, keep_kv=True)
        next(abandoned)
        del abandoned
        assert answer(moe, [*long, 3], keep_kv=True) == answer(anew, [*long, 3])
        assert moe.log.steps[-6].n_tokens == 1


def test_a_text_is_one_stop_text(model: Path) -> None:
    with MoE.load(model) as moe:
        whole = "".join(token.text for token in moe.generate(PROMPT, 16, ignore_end=True))
        stop = whole[4:7]
        cut = "".join(token.text for token in moe.generate(PROMPT, 16, ignore_end=True, stop=stop))
    assert cut == whole[: whole.index(stop)]


def test_temperatures_that_are_no_number_are_refused(model: Path) -> None:
    with MoE.load(model) as moe, pytest.raises(RequestError, match="finite"):
        moe.generate(PROMPT, 1, temperature=float("nan"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({"max_new_tokens": value}, "max_new_tokens is") for value in (0, 2.5, "3")),
        *(({"logprobs": value}, "logprobs is") for value in (-1, 1.5)),
        *(({"stop": value}, "stop text is empty or no text") for value in ([5], [""])),
        *(({name: None}, "must be numbers") for name in ("temperature", "top_k", "min_p")),
        ({"top_k": 2.5}, "top-k a whole one"),
        ({"prompt": "a\udcffb"}, "is not UTF-8 text"),
        ({"prompt": [{"role": "user", "content": "a\udcffb"}]}, "is not UTF-8 text"),
    ],
)
def test_a_request_with_which_nothing_can_be_generated_is_refused(model: Path, settings: dict, words: str) -> None:
    with MoE.load(model) as moe, pytest.raises(RequestError, match=words):
        moe.generate(**{"prompt": PROMPT, **settings})


@pytest.mark.parametrize(
    "wrong",
    [
        ["--temperature", "nan"],
        ["--max-new-tokens", "0"],
        ["--stop", ""],
        ["--logprobs", "-1", "--json"],
        ["--threads", "100000"],
        ["--soc", "\u0663"],
        ["--log", "/proc/moescope/log"],
    ],
)
def test_wrong_options_are_refused_before_anything_is_converted(
    model: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(model), "--prompt", PROMPT, *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (model / ".moescope-package").exists()


@pytest.mark.parametrize("ids", ["5", [[1]], 1e9, True, -1, [99999999]])
def test_end_tokens_that_are_no_token_ids_are_refused_before_converting(model: Path, ids: object) -> None:
    change(model / "generation_config.json", eos_token_id=ids)
    with pytest.raises(ModelError, match="token id"):
        MoE.load(model)


@pytest.mark.parametrize("name", [5, "../model.safetensors"])
def test_an_index_that_names_no_file_of_its_folder_is_refused(model: Path, name: object) -> None:
    change(model / "model.safetensors.index.json", weight_map={"a": name})
    with pytest.raises(ModelError, match=re.escape(str(name))):
        MoE.load(model)


def test_the_summary_says_whether_experts_are_prefetched_and_why(model: Path, golden: Golden) -> None:
    said = {}
    for choice in ("auto", "on", "off"):
        with MoE.load(model, "50%", prefetch=choice) as moe:
            list(moe.generate(PROMPT, 2))
            said[choice] = moe.log.statistics()["prefetching"]
    with MoE.load(model, prefetch="on") as moe:
        said["all in memory"] = moe.log.statistics()["prefetching"]
    golden("generate", "\n".join(f"{choice}: {why}" for choice, why in said.items()))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        *((prompt, "a prompt is text, a sequence of token ids, or messages") for prompt in (3.5, None, [1.5], [[1, 2]], ["a"])),
        *(([], "the prompt is empty"), ("", "the prompt is empty")),
        *(([1, 10**9], "the token id 1000000000: ids are from 0 to"), ([-1], "the token id -1")),
    ],
)
def test_what_is_no_prompt_is_refused_by_what_is_wrong_with_it(model: Path, prompt: object, words: str) -> None:
    with MoE.load(model) as moe, pytest.raises(RequestError, match=words):
        moe.generate(prompt, 1)  # type: ignore[arg-type]


def test_a_prompt_comes_from_standard_input(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["generate", str(model), "--max-new-tokens", "4", "--json"]
    assert main([*arguments, "--prompt", PROMPT]) == 0
    expected = json.loads(capsys.readouterr().out)["tokens"]
    (tmp_path / "prompt").write_text(PROMPT)
    with (tmp_path / "prompt").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main([*arguments, "--prompt-file", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_experts_per_tok": -1}, "num_experts_per_tok"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": []}, "this runtime knows"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"mlp_only_layers": list(range(64))}, "no layer"),
        ({"head_dim": 24}, "heads of 24"),
        ({"num_key_value_heads": 3}, "cannot share num_key_value_heads 3"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"rms_norm_eps": "small"}, r'rms_norm_eps "small", expected is a number above 0'),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps NaN, expected is"),
        ({"rope_parameters": {"rope_theta": "nan"}}, 'rope_theta "nan", expected is a number above 1'),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta -1, expected is"),
        ({"rms_norm_eps": None}, "rms_norm_eps null, expected is a number above 0"),
        ({"eos_token_id": "a"}, 'eos_token_id "a", expected is a whole number'),
        ({"layer_types": 5}, "layer_types 5, expected is a list"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"mlp_only_layers": "text"}, 'mlp_only_layers "text", expected is a list'),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta 0, expected is a number above 1"),
        ({"rope_parameters": {"truncate": "False"}}, 'truncate "False", expected is true or false'),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "heads of this family rotate as a whole"),
    ],
)
def test_configs_that_cannot_run_are_refused_before_converting(model: Path, changes: dict[str, object], words: str) -> None:
    config = json.loads((model / "config.json").read_text())
    with pytest.raises(ModelError, match=words):
        read_family(config | changes, model)


def test_a_tensor_that_nothing_would_use_and_numbers_that_are_none_are_named(model: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch_file

    path = model / "model.safetensors"
    tensors = load_file(path)
    ignorable = {"model.layers.0.self_attn.rotary_emb.inv_freq": tensors["model.norm.weight"]}
    save_file(tensors | ignorable, path)
    convert(model, tmp_path / "package")
    save_file(tensors | {"model.layers.0.mlp.novelty.weight": tensors["model.norm.weight"]}, path)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.novelty\.weight"):
        convert(model, tmp_path / "other")
    name = "model.layers.3.mlp.experts.7.down_proj.weight"
    for dtype, value in ((torch.float32, float("nan")), (torch.bfloat16, float("-inf")), (torch.float16, float("nan"))):
        stored = {key: torch.tensor(tensor).to(dtype) for key, tensor in tensors.items()}
        stored[name][-1, -1] = value
        save_torch_file(stored, path)
        with pytest.raises(ModelError, match=name):
            convert(model, tmp_path / "other", lambda done, total: pytest.fail("weights were converted before the check"))
    assert not (tmp_path / "other").exists()


def test_the_log_of_many_steps_keeps_the_newest_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "ROUTING_BYTES", 400_000)
    monkeypatch.setattr(log, "MOST_STEPS", 1000)
    layers, most = 4, 400_000 + 1000 * log.STEP_BYTES
    gc.collect()
    tracemalloc.start()
    kept, before = log.RunLog(), tracemalloc.get_traced_memory()[0]
    for seq in range(10_000):
        # As a decoded token comes: one array of all layers, and views of it.
        experts, weights = np.zeros((layers, 1, 8), np.uint16), np.zeros((layers, 1, 8), np.float32)
        for layer in range(layers):
            kept.route(seq, layer, experts[layer], weights[layer])
        kept.add(log.Step(seq, Phase.DECODE, 1, 10**6 + seq, 10**15 + seq, 10**15 + 2 * seq, 10**5 + seq))
        if seq % 100 == 0:
            assert tracemalloc.get_traced_memory()[0] - before < most
    tracemalloc.stop()
    assert kept.routing[-1][0] == kept.steps[-1].seq == 9_999
    assert kept.routing_dropped + len(kept.routing) == 40_000
    assert kept.steps_dropped + len(kept.steps) == kept.next_seq == kept.statistics()["steps"] == 10_000
    assert len(kept.routing) > 300 and len(kept.steps) >= 500
    assert kept.statistics()["decode_ns"] == sum(range(10_000))


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.long
def test_ten_thousand_steps_of_many_sequences_stay_right_and_within_the_memory_that_is_told(model: Path) -> None:
    prompts = [np.random.default_rng(seed).integers(0, 380, 40).tolist() for seed in range(4)]
    with MoE.load(model, expert_cache="25%") as moe:
        expected = [[token.id for token in moe.generate(ids, 100, ignore_end=True)] for ids in prompts]
        told, before = moe.describe()["memory_bytes"], anonymous_bytes()
        for turn in range(100):
            ids = prompts[turn % len(prompts)]
            abandoned = moe.generate(ids, 100, ignore_end=True)
            next(abandoned)
            del abandoned
            assert [token.id for token in moe.generate(ids, 100, ignore_end=True)] == expected[turn % len(prompts)]
        gc.collect()
        assert moe.log.statistics()["steps"] >= 10_000
        assert moe.log.statistics()["evictions"] > 0
        assert moe.log.statistics()["resident_bytes"] <= told["experts"]
        assert anonymous_bytes() - before <= told["kv"] + told["log"]


@pytest.mark.parametrize("keep_kv", [False, True])
def test_an_abandoned_generator_frees_its_keys_and_values_and_one_may_be_kept(model: Path, keep_kv: bool) -> None:
    with MoE.load(model) as moe:
        sequences = weakref.WeakSet[Sequence]()
        begin = moe.engine.begin_sequence
        moe.engine.begin_sequence = lambda *args: sequences.add(sequence := begin(*args)) or sequence  # type: ignore[method-assign]
        for ids in ([1] * 200, [2] * 400, [3] * 200):
            abandoned = moe.generate(ids, 3, keep_kv=keep_kv)
            next(abandoned)
            next(abandoned)
            assert sequences
            del abandoned
        gc.collect()
        assert len(sequences) == keep_kv


@pytest.mark.parametrize("length", [65, 129, 257])
def test_the_chunk_changes_logits_by_rounding_only(model: Path, length: int) -> None:
    ids = np.random.default_rng(length).integers(0, 380, length).tolist()
    rows = []
    for chunk in (16, 64, 512):
        with MoE.load(model, chunk=chunk) as moe:
            rows.append(moe.engine.step(moe.engine.begin_sequence(length), ids, Sampler(Sampling()))[1])
    assert max(np.abs(row - rows[0]).max() for row in rows) < 2e-5
