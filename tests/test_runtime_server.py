"""`serve`: OpenAI's own client gets what the model generates by itself, and whatever else arrives gets a clear status."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from moescope.__main__ import main
from runtime import MoE
from runtime.errors import InterruptedStepError
from runtime.package.convert import convert
from runtime.package.demo_model import TEXT, write_demo_model
from tests.conftest import ROOT, made_once

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
WORDS = TEXT.read_text(encoding="utf-8").split()
KEY = "a key"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{{ tools|tojson if tools }}assistant:"
SHORT, LONG = 24, 200


@dataclass
class Served:
    """A server, and the model that it serves."""

    process: subprocess.Popen[str]
    port: int
    package: Path
    key: str = ""

    @cached_property
    def client(self) -> Any:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=self.key or "none", max_retries=0)

    def metric(self, name: str) -> float:
        with urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def send(self, text: bytes, seconds: float = 20) -> tuple[int, bytes]:
        """(status, the rest) of what the server answers to these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            connection.sendall(text)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        return int(answer.split()[1]), answer

    def peak_bytes(self, restart: bool = False) -> int:
        """The most memory that the server had, from now on if it is to `restart`."""
        if restart:
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10


def posted(path: str, body: bytes, *headers: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def prepared(folder: Path) -> None:
    model = write_demo_model(folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    convert(model, folder / "served")


def package() -> Path:
    return made_once("served", prepared) / "served"


def server_of(pid: int) -> int:
    """The process that serves, of one and those that it started."""
    if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:4] == [b"-m", b"moescope", b"serve"]:
        return pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(filter(None, (server_of(int(child)) for child in children)), 0)


@contextlib.contextmanager
def serving(*options: str, key: str = "", before: tuple[str, ...] = ()) -> Iterator[Served]:
    command = [*before, sys.executable, "-m", "moescope", "serve", str(package()), "--port", "0", *options]
    environment = os.environ | {"MOESCOPE_API_KEY": key}
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr
    try:
        lines: list[str] = []
        while not (found := re.search(r"serving \S+ at http://127.0.0.1:(\d+)/v1", line := process.stderr.readline())):
            assert line, lines
            lines.append(line)
        yield Served(process, int(found[1]), package(), key)
    finally:
        os.kill(server_of(process.pid), signal.SIGINT)
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--expert-cache", "25%", "--body-mib", "1") as server:
        yield server


@pytest.fixture(scope="module")
def hurried() -> Iterator[Served]:
    with serving("--queue", "1", "--answer-seconds", "1", "--body-seconds", "1") as server:
        yield server


def ask(served: Served, number: int) -> tuple[str, Any]:
    """(text, usage) of a request whose prompt and way depend on its number."""
    prompt, settings = prompt_of(number), {"model": "served", "max_tokens": 8, "temperature": 0.0}
    client = served.client
    if number % 4 == 0:
        answer = client.completions.create(prompt=prompt, **settings)
        return answer.choices[0].text, answer.usage
    if number % 4 == 1:
        parts = list(client.completions.create(prompt=prompt, stream=True, stream_options={"include_usage": True}, **settings))
        return "".join(part.choices[0].text for part in parts if part.choices), parts[-1].usage
    messages = [{"role": "user", "content": prompt}]
    if number % 4 == 2:
        answer = client.chat.completions.create(messages=messages, **settings)
        return answer.choices[0].message.content, answer.usage
    parts = list(
        client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **settings)
    )
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices), parts[-1].usage


def prompt_of(number: int) -> str:
    return " ".join(WORDS[number * 7 % 500 :][: 5 + number % 9])


@pytest.mark.parametrize("count", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
def test_concurrent_requests_get_the_models_own_answers_none_lost_or_mixed(served: Served, count: int) -> None:
    with MoE.load(served.package) as model:
        prompts = [prompt_of(i) if i % 4 < 2 else [{"role": "user", "content": prompt_of(i)}] for i in range(count)]
        expected = [list(model.generate(prompt, 8)) for prompt in prompts]
        lengths = [len(model.prompt_ids(prompt)) for prompt in prompts]
    before = {name: served.metric(name) for name in ("moescope_experts_total", 'moescope_tokens_total{kind="generated"')}
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda i: ask(served, i), range(count)))
    assert [text for text, _ in answers] == ["".join(token.text for token in tokens) for tokens in expected]
    usages = [usage for _, usage in answers]
    assert [usage.prompt_tokens for usage in usages] == lengths
    assert [usage.completion_tokens for usage in usages] == [len(tokens) for tokens in expected]
    used = [usage.expert_cache for usage in usages]
    assert all(one["misses"] > 0 and one["loaded_bytes"] > 0 for one in used)
    after = {name: served.metric(name) for name in before}
    counted = sum(one[name] for one in used for name in ("hits", "misses", "loads"))
    assert [after[name] - before[name] for name in before] == [counted, sum(map(len, expected))]
    assert served.metric("moescope_requests_waiting") == 0


def test_settings_of_a_request_are_those_of_the_model(served: Served) -> None:
    asked: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    with MoE.load(served.package) as model:
        tokens = list(model.generate(prompt_of(1), 12, logprobs=2, **asked))
    settings = {"model": "served", "prompt": prompt_of(1), "max_tokens": 12, **asked}
    answer = served.client.completions.create(logprobs=2, **settings).choices[0]
    assert answer.text == "".join(token.text for token in tokens)
    assert answer.logprobs.token_logprobs == pytest.approx([token.logprob for token in tokens])
    assert answer.finish_reason == "length"
    stop = answer.text[5:8]
    short = served.client.completions.create(stop=[stop], **settings).choices[0]
    assert (short.text, short.finish_reason) == (answer.text.split(stop)[0], "stop")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    usage = [
        served.client.chat.completions.create(
            model="served", messages=[{"role": "user", "content": "a"}], max_tokens=1, **more
        ).usage
        for more in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"})
    ]
    assert usage[1].prompt_tokens != usage[0].prompt_tokens == usage[2].prompt_tokens


def test_a_conversation_that_continues_computes_only_what_is_new(served: Served) -> None:
    ids, client = list(range(40, 80)), served.client
    first = client.completions.create(model="served", prompt=ids, max_tokens=1)
    second = client.completions.create(model="served", prompt=[*ids, 7, 8], max_tokens=1)
    assert first.usage.prompt_tokens_details.cached_tokens < 40 == second.usage.prompt_tokens_details.cached_tokens


CHAT, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (TEXT_PATH, b'{"prompt": ', 400),
        (TEXT_PATH, b"[1]", 400),
        (TEXT_PATH, b'{"prompt": "\xff"}', 400),
        (TEXT_PATH, b"[" * 100_000, 400),
        (TEXT_PATH, b"{}", 400),
        (TEXT_PATH, b'{"prompt": ""}', 400),
        (TEXT_PATH, b'{"prompt": [1, -5]}', 400),
        (TEXT_PATH, b'{"prompt": [true]}', 400),
        (TEXT_PATH, b'{"prompt": "a", "n": 2}', 400),
        (TEXT_PATH, b'{"prompt": "a", "nonsense": 2}', 400),
        (TEXT_PATH, b'{"prompt": "a", "temperature": "hot"}', 400),
        (TEXT_PATH, b'{"prompt": "a", "max_tokens": 0}', 400),
        (TEXT_PATH, b'{"prompt": "a", "max_tokens": 100000}', 400),
        (TEXT_PATH, b'{"prompt": "a", "model": "another"}', 404),
        (CHAT, b'{"messages": []}', 400),
        (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400),
        (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tokenize": false}}', 400),
        ("/v1/models/another", b"", 405),
        ("/nothing", b"", 404),
    ],
)
def test_a_wrong_request_gets_its_status_and_a_reason(served: Served, path: str, body: bytes, status: int) -> None:
    found, answer = served.send(posted(path, body, "Connection: close"))
    assert found == status
    if status == 400:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_other_content_other_hosts_and_other_keys_are_refused(served: Served) -> None:
    body = b'{"prompt": "a"}'
    assert served.send(posted(TEXT_PATH, body, "Connection: close").replace(b"application/json", b"text/plain"))[0] == 415
    assert served.send(posted(TEXT_PATH, body, "Connection: close").replace(b"Host: localhost", b"Host: elsewhere"))[0] == 400
    with serving(key=KEY) as guarded:
        assert [model.id for model in guarded.client.models.list()] == ["served"]
        for wrong in ("Authorization: Bearer another", "Authorization: Bearer", "X: y"):
            assert guarded.send(posted(TEXT_PATH, body, "Connection: close", wrong))[0] == 401
        assert guarded.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")[0] == 401


def test_only_with_a_key_is_a_server_reachable_from_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOESCOPE_API_KEY", raising=False)
    assert main(["serve", str(package()), "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--api-key-file" in capsys.readouterr().err


@pytest.mark.parametrize("size", [8_000_000, pytest.param(100_000_000, marks=pytest.mark.long)])
def test_large_bodies_are_refused_and_no_more_than_the_limit_of_them_is_held(served: Served, size: int) -> None:
    body = b'{"prompt": "' + b"a" * size + b'"}'
    served.send(posted(TEXT_PATH, body[: 1 << 21], "Connection: close"))
    before = served.peak_bytes(restart=True)
    for _ in range(4):
        assert served.send(posted(TEXT_PATH, body, "Connection: close"), 60)[0] == 413
    assert served.peak_bytes() - before < 4 << 20


def test_a_slow_body_gets_408_and_hinders_nobody(hurried: Served) -> None:
    with socket.create_connection(("127.0.0.1", hurried.port), timeout=20) as slow:
        slow.sendall(posted(TEXT_PATH, b'{"prompt": "a"}')[:-3])
        assert hurried.client.completions.create(model="served", prompt="a", max_tokens=1).usage.completion_tokens == 1
        assert slow.recv(65536).split()[1] == b"408"


def test_a_client_that_leaves_ends_its_request(served: Served) -> None:
    before = served.metric("moescope_requests_cancelled_total"), served.metric("moescope_tokens_total")
    for stream in (True, False):
        body = json.dumps({"prompt": "a", "max_tokens": 1000, "temperature": 0, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as leaving:
            leaving.sendall(posted(TEXT_PATH, body))
            time.sleep(0.05)
    until = time.monotonic() + 20
    while served.metric("moescope_requests_waiting") and time.monotonic() < until:
        time.sleep(0.05)
    after = served.metric("moescope_requests_cancelled_total"), served.metric("moescope_tokens_total")
    assert after == (before[0] + 2, before[1])


@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_prompt_that_nobody_waits_for_ends_within_a_chunk_and_the_next_answer_is_right(tmp_path: Path, keep_kv: bool) -> None:
    package = write_demo_model(tmp_path)
    asked: list[int] = []

    def unwanted() -> bool:
        asked.append(len(model.log.routing))
        return len(asked) > 7

    with MoE.load(package) as whole, MoE.load(package, "2MiB", chunk=8) as model:
        prompt = list(range(64))
        expected = [token.id for token in whole.generate(prompt, 8)]
        with pytest.raises(InterruptedStepError):
            list(model.generate(prompt, 8, keep_kv=keep_kv, unwanted=unwanted))
        assert len(asked) == 8 and len(model.log.routing) == 7, "of chunks of 8 rows, the eighth has not run"
        assert [token.id for token in model.generate(prompt, 8, keep_kv=keep_kv)] == expected


def test_a_full_queue_and_a_request_out_of_time_are_said(hurried: Served) -> None:
    with ThreadPoolExecutor(1) as thread:
        client = hurried.client
        first = thread.submit(client.completions.create, model="served", prompt="a", max_tokens=1000, temperature=0)
        while not hurried.metric("moescope_requests_waiting"):
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="served", prompt="a")
        with contextlib.suppress(openai.InternalServerError):
            first.result()


@pytest.mark.needs("probes")
def test_a_recording_shows_each_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    tracer = (sys.executable, "-m", "tracer", "run", "--levels", "token", "-o", str(run), "--")
    with serving(before=tracer) as traced, ThreadPoolExecutor(8) as threads:
        usages = [usage for _, usage in threads.map(lambda i: ask(traced, i), range(12))]
    assert main(["time", "requests", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["count"] == len(usages)
    counted = [(one["prompt"], one["cached"], one["generated"]) for one in found["requests"]]
    told = [
        (u.prompt_tokens - u.prompt_tokens_details.cached_tokens, u.prompt_tokens_details.cached_tokens, u.completion_tokens)
        for u in usages
    ]
    assert sorted(counted) == sorted(told)
