"""A server of llama.cpp under load: server_load.py READERS SECONDS LLAMA_SERVER MODEL [OPTION...]. Prints what clients saw.

READERS clients ask for 64 tokens each, again and again for SECONDS; another feeds prompts of 800 tokens, with a second between.
As JSON: `tokens` that the readers got, `gap_ms`, quantiles of the time between a reader's tokens, and `ttft_ms` of long prompts.
"""

import contextlib
import json
import subprocess
import sys
import time
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

PORT, START_S = 18080, 120
HEADERS = {"Content-Type": "application/json"}


def token_times(prompt: list[int], new: int) -> list[float]:
    """When the request was sent and each token arrived, in s."""
    sampling = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
    body = json.dumps({"prompt": prompt, "n_predict": new, "stream": True, **sampling}).encode()
    times = [time.monotonic()]
    with urlopen(Request(f"http://127.0.0.1:{PORT}/completion", body, HEADERS)) as answer:
        times += [time.monotonic() for line in answer if line.startswith(b"data:")]
    return times


def wait_until_ready(server: subprocess.Popen[Any]) -> None:
    """Return when the model is loaded."""
    ends = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < ends:
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{PORT}/health") as health:
            if health.status == 200:
                return
        time.sleep(0.1)
    sys.exit("the server did not start: run its command alone to see why")


def run_clients(readers: int, seconds: float) -> dict[str, Any]:
    """The load, and what clients saw."""
    gaps: list[float] = []
    firsts: list[float] = []
    ends = time.monotonic() + seconds

    def read(reader: int) -> None:
        while time.monotonic() < ends:
            gaps.extend(np.diff(token_times([(7 * i + 31 * reader) % 256 for i in range(20)], 64)[1:]))

    def feed() -> None:
        while time.monotonic() < ends:
            firsts.append(np.diff(token_times([(5 * i + len(firsts)) % 256 for i in range(800)], 8))[0])
            time.sleep(1)

    clients = [*(Thread(target=read, args=(reader,)) for reader in range(readers)), Thread(target=feed)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    quantiles = {f"p{100 * share:g}": round(1e3 * float(np.quantile(gaps, share)), 1) for share in (0.5, 0.9, 0.99)}
    return {"tokens": len(gaps), "gap_ms": quantiles, "ttft_ms": round(1e3 * float(np.median(firsts)), 1)}


def main() -> None:
    readers, seconds, program, model, *options = sys.argv[1:]
    command = [program, "-m", model, "--host", "127.0.0.1", "--port", str(PORT), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until_ready(server)
            print(json.dumps(run_clients(int(readers), float(seconds))), flush=True)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
