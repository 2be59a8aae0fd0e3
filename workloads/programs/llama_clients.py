"""xllamacpp's server and its clients: llama_clients.py MODEL SLOTS CLIENTS [DRAFT_MODEL]. Prints what both measured.

After a first request alone, as client CLIENTS, all clients ask at once and stream their answers. Client i's prompt has 20 + 7 i
tokens if i is odd, else 300 + 60 i; its answer has 12 + i. They are a process of their own with one thread, so that they wait
neither for the server nor for each other, and the kernel notes when each chunk arrived. As JSON: `requests` with the times
(CLOCK_MONOTONIC, ns) when the client sent it and received each chunk and the end, the server's own `timings`, and `http_ns`, the
(begin, end) of HTTP requests with the same body that are answered without the model; `metrics`, the server's counters.
"""

import contextlib
import json
import re
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

SO_TIMESTAMPNS = 35  # Linux; the module socket has no name for it
HTTP_REQUESTS = 5
PARTS_OF_LETTERS = range(128, 256)
"""Tokens of gguf_model's tokenizer that the server holds back until others complete a letter: they have no chunk of their own."""
REAL_TIME_NS = time.clock_gettime_ns(time.CLOCK_REALTIME) - time.monotonic_ns()
"""CLOCK_REALTIME, of the kernel's notes, less CLOCK_MONOTONIC."""


def run_server(model: str, slots: int, clients: int, draft: str) -> None:
    """Run the server until its clients, a child process, are done."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = model, slots, 1024 * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics, params.port, params.n_gpu_layers = True, 0, 0
    params.cache_prompt, params.cache_ram_mib = False, 0  # a copy of the slot's last prompt would come before the next one
    if draft:
        params.speculative.draft.mparams.path = draft
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    server = xllamacpp.Server(params)
    subprocess.run([sys.executable, __file__, "--ask", urlsplit(server.listening_address).netloc, str(clients)], check=True)


def request_body(number: int) -> bytes:
    """The body of client `number`'s request."""
    length = 20 + 7 * number if number % 2 else 300 + 60 * number
    prompt = [(7 * i + 31 * number) % 256 for i in range(length)]
    sampling = {"temperature": 0.1, "top_k": 3, "seed": number, "logit_bias": [[token, False] for token in PARTS_OF_LETTERS]}
    about = {"n_predict": 12 + number, "stream": True, "ignore_eos": True, "cache_prompt": False}
    return json.dumps({"prompt": prompt, "content": "", **about, **sampling}).encode()


class Exchange:
    """An HTTP request over a connection of its own, and its answer."""

    def __init__(self, address: str, path: str, body: bytes = b""):
        host, port = address.split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request, self.sent_ns = head.encode() + body, 0
        self.received: list[tuple[int, bytes]] = []
        """(when it arrived, bytes)."""

    def send(self) -> None:
        self.sent_ns = time.monotonic_ns()
        self.socket.sendall(self.request)

    def receive(self) -> bool:
        """Whether more may come."""
        data, notes, _, _ = self.socket.recvmsg(1 << 16, 64)
        if data:
            seconds, ns = struct.unpack("qq", notes[0][2])
            self.received.append((seconds * 10**9 + ns - REAL_TIME_NS, data))
        return bool(data)

    def lines(self) -> list[tuple[int, bytes]]:
        """(when its end arrived, line) of the answer."""
        answer, rest = [], b""
        for at, data in self.received:
            *whole, rest = (rest + data).split(b"\n")
            answer += [(at, line) for line in whole]
        return [*answer, (self.received[-1][0], rest)]


def send_all(*all_of_them: Exchange) -> None:
    """Send all requests at once and receive the answers."""
    open_ones = selectors.DefaultSelector()
    for one in all_of_them:
        open_ones.register(one.socket, selectors.EVENT_READ, one)
    for one in all_of_them:
        one.send()
    while open_ones.get_map():
        for key, _ in open_ones.select():
            if not key.data.receive():
                open_ones.unregister(key.fileobj)


@contextlib.contextmanager
def stamped_arrivals(address: str) -> Iterator[None]:
    """Within it every arrival has its time: the kernel begins to stamp packets some time after the first socket asks for it."""
    with socket.socket() as asking:
        asking.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        for _ in range(100):
            one = Exchange(address, "/health")
            one.socket.sendall(one.request)
            if one.socket.recvmsg(1 << 16, 64)[1]:
                break
            time.sleep(0.01)
        yield


def http_ns(address: str, body: bytes) -> list[tuple[int, int]]:
    """(begin, end) of requests that the server reads but answers without its model."""
    answer = []
    for _ in range(HTTP_REQUESTS):
        one = Exchange(address, "/tokenize", body)
        send_all(one)
        answer.append((one.sent_ns, one.received[0][0]))
    return answer


def answer_of(one: Exchange) -> dict[str, Any]:
    """The client's times and what the server says at the end."""
    chunks = [(at, json.loads(line[6:])) for at, line in one.lines() if line.startswith(b"data: {")]
    *given, (stop_ns, last) = chunks
    told = {name: last[name] for name in ("timings", "tokens_evaluated", "tokens_predicted", "id_slot")}
    return {"sent_ns": one.sent_ns, "chunk_ns": [at for at, _ in given], "stop_ns": stop_ns, **told}


def ask_as_clients(address: str, clients: int) -> None:
    bodies = [request_body(number) for number in (clients, *range(clients))]
    first = Exchange(address, "/completion", bodies[0])
    send_all(first)
    others = [Exchange(address, "/completion", body) for body in bodies[1:]]
    send_all(*others)
    metrics = Exchange(address, "/metrics")
    send_all(metrics)
    counters = [re.fullmatch(rb"llamacpp:(\w+) ([0-9.e+]+)\r?", line) for _, line in metrics.lines()]
    answers = [answer_of(one) | {"http_ns": http_ns(address, body)} for one, body in zip((first, *others), bodies, strict=True)]
    print(json.dumps({"requests": answers, "metrics": {one[1].decode(): float(one[2]) for one in counters if one}}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--ask":
        with stamped_arrivals(sys.argv[2]):
            ask_as_clients(sys.argv[2], int(sys.argv[3]))
    else:
        run_server(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), (*sys.argv[4:], "")[0])
