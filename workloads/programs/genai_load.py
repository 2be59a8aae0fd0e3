"""Workers that serve a model by onnxruntime-genai: genai_load.py FOLDER WORKERS SECONDS [OPTION=VALUE...]. Prints what they did.

Each of WORKERS processes has the model for itself, like those of a web server, and answers prompts of 32 tokens by 64 others, one
after the other for SECONDS. OPTION: of the session, as `intra_op_num_threads=1`. As JSON: `tokens` of all workers together, and
`gap_ms`, quantiles of the time between an answer's tokens. The model has random weights, and is written to FOLDER once.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from genai_steps import Sizes, genai_config, write_model

SIZES = Sizes(vocabulary=4096, width=768, heads=12, layers=8, hidden=3072)
PROMPT, NEW = 32, 64


def prepare(folder: Path, options: dict[str, str]) -> None:
    """Write the model if it is not there, and its configuration with these options of the session."""
    if not (folder / "model.onnx").exists():
        write_model(folder, SIZES)
    config = genai_config(SIZES)
    numbers = {name: int(value) if name.endswith("threads") else value for name, value in options.items()}
    config["model"]["decoder"]["session_options"] |= numbers
    (folder / "genai_config.json").write_text(json.dumps(config))


def token_times(model: Any, prompt: list[int]) -> list[float]:
    """When each token of the answer was there, in s."""
    import onnxruntime_genai as genai

    generator, times = genai.Generator(model, genai.GeneratorParams(model)), []
    generator.append_tokens(prompt)
    for _ in range(NEW):
        generator.generate_next_token()
        times.append(time.monotonic())
    return times


def work(folder: str, number: int, seconds: float) -> None:
    """A worker: loads the model, prints `ready`, and answers after a line of input."""
    import onnxruntime_genai as genai

    model, gaps, answers = genai.Model(folder), list[float](), 0
    print("ready", flush=True)
    sys.stdin.readline()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        prompt = [(7 * i + 31 * number + answers) % (SIZES.vocabulary - 2) + 1 for i in range(PROMPT)]
        gaps += np.diff(token_times(model, prompt)).tolist()
        answers += 1
    print(json.dumps({"tokens": answers * NEW, "gaps": gaps}), flush=True)


def main() -> None:
    folder, workers, seconds, *options = sys.argv[1:]
    prepare(Path(folder), dict(option.split("=", 1) for option in options))
    command = [sys.executable, __file__, "--worker", folder]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, str(number), seconds], **pipes) for number in range(int(workers))]  # type: ignore[call-overload]
    for worker in started:
        worker.stdout.readline()
    for worker in started:
        worker.stdin.write("\n")
        worker.stdin.flush()
    answers = [json.loads(worker.communicate()[0]) for worker in started]
    gaps = [gap for answer in answers for gap in answer["gaps"]]
    quantiles = {f"p{100 * share:g}": round(1e3 * float(np.quantile(gaps, share)), 1) for share in (0.5, 0.9, 0.99)}
    print(json.dumps({"tokens": sum(answer["tokens"] for answer in answers), "gap_ms": quantiles}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        work(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
