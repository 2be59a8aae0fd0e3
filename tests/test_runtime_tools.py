"""Calls of tools: what templates of published models write is read back, and OpenAI's client gets it as tool_calls."""

import asyncio
import json
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from runtime import MoE
from runtime.moe import TextStream
from runtime.package.channels import MARKS, Channels
from runtime.package.demo_model import DemoSizes, write_demo_model
from runtime.package.tokens import ChatTemplate, read_tokenizer
from runtime.server.tools import FORMS, Call, CallFinder, form_of

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")
pytest.importorskip("starlette")
TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
KNOWN = {"Qwen-Qwen3-0.6B": "json", "ibm-granite-granite-4.0": "json", "Qwen3-Coder": "function", "Qwen3.5-4B": "function"}
KNOWN |= {"GLM-4.6": "pairs", "GLM-4.7-Flash": "pairs"}
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
SCHEMAS: dict[str, Any] = {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}, "sure": {}}
WEATHER = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": SCHEMAS}}
TOOLS = [{"type": "function", "function": WEATHER}]
QUESTION = {"role": "user", "content": "Rain?"}
GPT_OSS = "openai-gpt-oss-120b"
SAID = {
    GPT_OSS: [
        *("<|channel|>", "commentary to=functions.weather ", "<|constrain|>", "json", "<|message|>"),
        *('{"city": "A b', '", "days": 3}', "<|call|>"),
    ],
    "Qwen-Qwen3-0.6B": [
        "I look. ",
        '<tool_call>\n{"name": ',
        '"weather", "arguments": {"city": "A b',
        '", "days": 3}}\n</tool',
        "_call>",
    ],
    "Qwen3-Coder": [
        *("I look. ", "<tool_call>\n<function=weather>\n<parameter=city>\nA", " b\n</parameter>\n<parameter=days>\n3\n"),
        *("</parameter>\n</function>", "\n</tool_call>"),
    ],
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("demo"))


def with_template(demo: Path, name: str) -> Any:
    """What a loaded model with this template has."""
    (demo / "chat_template.jinja").write_bytes((TEMPLATES / f"{name}.jinja").read_bytes())
    if name == GPT_OSS:
        tokenizer = read_tokenizer(demo)
        tokenizer.add_special_tokens([*MARKS, "<|constrain|>", "<|call|>", "<|return|>"])
        tokenizer.save(str(demo / "tokenizer.json"))
    return SimpleNamespace(tokenizer=read_tokenizer(demo), apply_chat_template=ChatTemplate(demo).ids)


def test_calls_in_channels_are_read_back(tmp_path: Path) -> None:
    model = with_template(write_demo_model(tmp_path), GPT_OSS)
    assert form_of(model) == "json"
    for arguments in ({"city": 'A "é"\n', "days": -1}, {}):
        called = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [QUESTION, {"role": "assistant", "content": "Thought.", "tool_calls": [called]}]
        ids = model.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=False)
        channels, stream = Channels(model.tokenizer, calls=True), TextStream(model.tokenizer)
        text = "".join(channels.shown(i, stream.add(i)) for i in ids) + channels.end()
        parts = CallFinder(FORMS["json"], {"weather": SCHEMAS}).add(text, last=True)
        assert [json.loads(part.arguments) for part in parts if isinstance(part, Call)] == [arguments]
        assert "Thought." not in text
    unmarked = Channels(model.tokenizer, calls=True)
    assert unmarked.shown(65, "a") + unmarked.shown(66, "b") + unmarked.end() == "ab"


@pytest.mark.parametrize("name", [name for name in NAMES if name != GPT_OSS])
def test_calls_that_a_published_template_writes_are_read_back_in_pieces_of_any_size(demo: Path, name: str) -> None:
    model, rng = with_template(demo, name), np.random.default_rng(NAMES.index(name))
    assert form_of(model) == KNOWN.get(name)
    if name not in KNOWN:
        return
    texts = ["", "a", 'A "b"', "1", "true", "ä\n b", "<x> </tool", "{", "\\", " 0 "]
    for _ in range(20):
        drawn = [
            {
                "city": str(rng.choice(texts)),
                "days": int(rng.integers(-9, 9)),
                "sure": bool(rng.integers(2)),
                "more": {"a": [1, "é"]},
            }
            for _ in range(rng.integers(1, 4))
        ]
        calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": each}} for each in drawn]
        messages = [QUESTION, {"role": "assistant", "content": "I look.", "tool_calls": calls}]
        written = model.tokenizer.decode(model.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=False))
        finder, parts, begin = CallFinder(FORMS[KNOWN[name]], {"weather": SCHEMAS}), [], 0
        while begin < len(written):
            end = begin + int(rng.integers(1, 40))
            parts += finder.add(written[begin:end], last=end >= len(written))
            begin = end
        assert [json.loads(part.arguments) for part in parts if isinstance(part, Call)] == drawn
        assert "I look." in "".join(part for part in parts if isinstance(part, str))


def test_what_is_no_call_of_a_known_tool_stays_text() -> None:
    tools = {"weather": SCHEMAS}
    call = '{"name": "weather", "arguments": {}}'
    for text in (
        *("<tool_call>", "a <tool_call>\n{", "<tool_call></tool_call>", "<tool_call>{}</tool_call>", "</tool_call>", "<tool_"),
        *(f"<tool_call>{call.replace('weather', 'other')}</tool_call>", f"<tool_call>[{call}]</tool_call>"),
        *(f"<tool_call>{call[:-3]}[]}}</tool_call>", '<tool_call>{"name": [], "arguments": {}}</tool_call>'),
    ):
        finder = CallFinder(FORMS["json"], tools)
        assert "".join(map(str, [*finder.add(text), *finder.add("", last=True)])) == text
    assert CallFinder(FORMS["json"], tools).add(f"<tool_call> a <tool_call>{call}</tool_call>b") == [
        *("<tool_call> a ", Call("weather", "{}"), "b")
    ]


def saying(folder: Path, name: str) -> Path:
    """A model that answers every conversation with the pieces in SAID: each token has one that follows it."""
    model = write_demo_model(folder, sizes=DemoSizes(layers=1, context=4096))
    with_template(model, name)
    tokenizer, tensors = read_tokenizer(model), load_file(model / "model.safetensors")
    tokenizer.add_tokens([piece for piece in SAID[name] if tokenizer.token_to_id(piece) is None])
    tokenizer.save(str(model / "tokenizer.json"))
    said, table = [tokenizer.token_to_id(piece) for piece in SAID[name]], tensors["model.embed_tokens.weight"]
    rows = np.random.default_rng(1).standard_normal((tokenizer.get_vocab_size() - len(table), 128)).astype(np.float32)
    table = np.concatenate([table, rows])
    head, order = np.zeros_like(table), [ChatTemplate(model).ids([QUESTION])[-1], *said, 0]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, tokenizer.token_to_id("<|call|>") or 0]}))
    for current, following in pairwise(order):
        head[following] = table[current]
    silent = {key: np.zeros_like(value) for key, value in tensors.items() if key.endswith(("o_proj.weight", "down_proj.weight"))}
    tensors |= silent | {"model.embed_tokens.weight": table, "lm_head.weight": head}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": len(table)}
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("name", SAID)
def test_the_openai_client_gets_calls_whole_and_streamed_and_sends_back_what_they_returned(tmp_path: Path, name: str) -> None:
    from runtime.server.app import Limits, Server

    folder = saying(tmp_path, name)
    expected, text = {"city": "A b", "days": 3}, "" if name == GPT_OSS else "I look. "

    async def conversation(model: MoE) -> None:
        server = Server(model, "served", Limits())
        transport = httpx.ASGITransport(app=server.app)
        client = openai.AsyncOpenAI(
            base_url="http://x/v1", api_key="none", max_retries=0, http_client=httpx.AsyncClient(transport=transport)
        )

        def ask(messages: list[Any], **settings: Any) -> Coroutine[Any, Any, Any]:
            asked: dict[str, Any] = {"model": "served", "messages": messages, "temperature": 0, "tools": TOOLS} | settings
            return client.chat.completions.create(**asked)

        answer = await ask([QUESTION])
        choice, message = answer.choices[0], answer.choices[0].message
        called = message.tool_calls[0]
        assert (message.content, choice.finish_reason, called.function.name) == (text or None, "tool_calls", "weather")
        assert json.loads(called.function.arguments) == expected
        returned = {"role": "tool", "tool_call_id": called.id, "content": "sun"}
        second = await ask([QUESTION, message.model_dump(exclude_none=True), returned])
        history = {"role": "assistant", "content": text, "tool_calls": [called.model_dump()]}
        history["tool_calls"][0]["function"]["arguments"] = expected
        ids = model.apply_chat_template([QUESTION, history, returned], tools=TOOLS)
        assert second.usage.prompt_tokens == len(ids)
        parts = [part.choices[0] async for part in await ask([QUESTION], stream=True)]
        assert "".join(part.delta.content or "" for part in parts) == text
        streamed = [call for part in parts for call in part.delta.tool_calls or ()]
        assert [(call.index, call.function.arguments) for call in streamed] == [(0, called.function.arguments)]
        assert parts[-1].finish_reason == "tool_calls"
        short = (await ask([QUESTION], max_tokens=3)).choices[0]
        assert (short.finish_reason, short.message.content) == ("length", text and "".join(SAID[name][:3]))
        for settings in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
            plain = (await ask([QUESTION], **settings)).choices[0]
            assert (plain.finish_reason, plain.message.content) == ("stop", text and "".join(SAID[name]))
        for wrong in (
            *({"tool_choice": "required"}, {"parallel_tool_calls": False}, {"tools": [{"type": "function"}]}),
            {"tools": [{"type": "function", "function": WEATHER | {"strict": True}}]},
        ):
            with pytest.raises(openai.BadRequestError):
                await ask([QUESTION], **wrong)
        server.turns.close()

    with MoE.load(folder) as model:
        asyncio.run(conversation(model))
