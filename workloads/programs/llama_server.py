"""llama.cpp's server within this process: llama_server.py MODEL SLOTS CLIENTS NEW_TOKENS [DRAFT].

Each client asks once, all at the same time; more clients than slots wait. DRAFT: a smaller model of the same vocabulary, whose
guesses the model verifies. Needs models with a tokenizer (gguf_model.write). Prints the number of tokens that each client got.
"""

import json
import os
import sys
from threading import Thread
from typing import Any

import xllamacpp

CONTEXT = 256  # tokens of each slot
THREADS = int(os.environ.get("LLAMA_THREADS", "2"))


def server_parameters(model: str, slots: int, draft: str) -> Any:
    """The server's, on the CPU."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = model, slots, slots * CONTEXT
    params.n_gpu_layers, params.fit_params, params.port = 0, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    if draft:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = draft
    return params


def complete_prompt(server: Any, client: int, new: int, counts: dict[int, int]) -> None:
    """One greedy completion of a prompt that only this client has."""
    prompt = [(7 * i + 31 * client) % 256 for i in range(8 + 4 * client)]
    answer = server.handle_completions({"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True})
    counts[client] = int(answer["usage"]["completion_tokens"])


def main() -> None:
    model, slots, clients, new, draft = (*sys.argv[1:], "")[:5]
    server, counts = xllamacpp.Server(server_parameters(model, int(slots), draft)), dict[int, int]()
    threads = [Thread(target=complete_prompt, args=(server, client, int(new), counts)) for client in range(int(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps([counts[client] for client in range(int(clients))]), flush=True)


if __name__ == "__main__":
    main()
