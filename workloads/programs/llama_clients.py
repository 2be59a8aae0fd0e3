"""xllamacpp's server and its clients: llama_clients.py MODEL SLOTS CLIENTS [DRAFT_MODEL]. Prints what both measured.

After a first request alone, as client CLIENTS, all clients ask at once and stream their answers; client i's prompt has 20 + 7 i
tokens, its answer 12 + i tokens (times LLAMA_TOKENS, default 1). As JSON: `requests` with the times (CLOCK_MONOTONIC, ns) when
the client sent it and received each chunk, and the server's own `timings`; `http_ns`, the times of empty requests; `metrics`,
the server's counters.
"""

import http.client
import json
import os
import re
import sys
import time
from threading import Barrier, Thread
from typing import Any
from urllib.parse import urlsplit

import xllamacpp

TOKENS = int(os.environ.get("LLAMA_TOKENS", "1"))
EMPTY_REQUESTS = 20
PARTS_OF_LETTERS = range(128, 256)
"""Tokens of gguf_model's tokenizer that the server holds back until others complete a letter: they have no chunk of their own."""


def parameters(model: str, slots: int, draft: str) -> xllamacpp.CommonParams:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = model, slots, 1024 * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics, params.port, params.n_gpu_layers = True, 0, 0
    params.cache_prompt = False
    if draft:
        params.speculative.draft.mparams.path = draft
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    return params


class Client:
    """One request over a connection of its own."""

    def __init__(self, address: str, number: int):
        self.connection = http.client.HTTPConnection(address)
        self.connection.connect()
        prompt = [(7 * i + 31 * number) % 256 for i in range(20 + 7 * number)]
        self.request = {
            "prompt": prompt,
            "n_predict": (12 + number) * TOKENS,
            "stream": True,
            "temperature": 1,
            "top_k": 3,
            "seed": number,
        }
        self.request["logit_bias"] = [[token, False] for token in PARTS_OF_LETTERS]
        self.request |= {"top_k": 3, "seed": number, "ignore_eos": True, "cache_prompt": False}
        self.answer: dict[str, Any] = {"chunk_ns": []}

    def ask(self, begin: Barrier) -> None:
        begin.wait()
        self.answer["sent_ns"] = time.monotonic_ns()
        self.connection.request("POST", "/completion", json.dumps(self.request), {"Content-Type": "application/json"})
        for line in self.connection.getresponse():
            now = time.monotonic_ns()
            if line.startswith(b"data: "):
                self._note(now, json.loads(line[6:]))

    def _note(self, now: int, chunk: dict[str, Any]) -> None:
        if chunk.get("stop"):
            self.answer |= {name: chunk[name] for name in ("timings", "tokens_evaluated", "tokens_predicted", "id_slot")}
        else:
            self.answer["chunk_ns"].append(now)


def get(address: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(address)
    connection.request("GET", path)
    return connection.getresponse().read()


def empty_request_ns(address: str) -> int:
    begin = time.monotonic_ns()
    get(address, "/health")
    return time.monotonic_ns() - begin


def main() -> None:
    server = xllamacpp.Server(parameters(sys.argv[1], int(sys.argv[2]), (*sys.argv[4:], "")[0]))
    address = urlsplit(server.listening_address).netloc
    first = Client(address, int(sys.argv[3]))  # slower than others
    first.ask(Barrier(1))
    clients = [Client(address, number) for number in range(int(sys.argv[3]))]
    begin = Barrier(len(clients))
    threads = [Thread(target=client.ask, args=(begin,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters = re.findall(r"^llamacpp:(\w+) ([0-9.e+]+)$", get(address, "/metrics").decode(), re.M)
    answer = {
        "requests": [client.answer for client in (first, *clients)],
        "metrics": {name: float(value) for name, value in counters},
        "http_ns": [empty_request_ns(address) for _ in range(EMPTY_REQUESTS)],
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
