"""Records six kinds of use of engines, two runs of each: twelve recordings that a figure must hold on.

python -m workloads.six_kinds FOLDER [NAME...]        as root; FOLDER/NAME is a recording, FOLDER/models has the models
python -m workloads.six_kinds --list                  the names
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from workloads import PROGRAMS, ROOT
from workloads.gguf_model import DENSE, SHAPES, SMALL, write_model
from workloads.llama_libraries import library_folder

WRITE = {
    "moe": lambda path: write_model(path, SMALL, quantized=False, tokenizer=True),
    "dense": lambda path: write_model(path, DENSE["llama"], quantized=False, tokenizer=True),
    "wide": lambda path: write_model(path, SHAPES["tiny-moe"], quantized=True),
    "deep": lambda path: write_model(path, replace(SMALL, layers=4), quantized=False),
}
PAUSE_S = "0.02"
GENERATE = ("generate", "{demo}", "--prompt", "The router looks at the tokens", "--ignore-end", "--max-new-tokens", "16")
BUSY = "while True: pass"


@dataclass(frozen=True)
class Use:
    """A command, with {NAME} for the model NAME, its environment, and how many other programs compute beside it."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    beside: int = 0


def steps(model: str, batches: str, new: int, threads: int, beside: int = 0, environment: dict[str, str] | None = None) -> Use:
    """llama.cpp through its C API."""
    words = (str(PROGRAMS / "llama_steps.py"), "{" + model + "}", batches, str(new), PAUSE_S)
    return Use(words, {"LLAMA_THREADS": str(threads), **(environment or {})}, beside)


def use_server(slots: int, clients: int, draft: str = "") -> Use:
    """llama.cpp's server."""
    words = ("{moe}", str(slots), str(clients), "60", *(["{" + draft + "}"] if draft else []))
    return Use((str(PROGRAMS / "llama_server.py"), *words))


def use_vulkan(layers: int) -> Use:
    """llama.cpp with some layers on the first Vulkan device, which may be Mesa's on the CPU."""
    device = {"GGML_VK_DISABLE_FUSION": "1", "GGML_VK_VISIBLE_DEVICES": "0", "LLAMA_GPU_LAYERS": str(layers)}
    return steps("deep", "20,7", 8, 2, environment={**device, "LLAMA_LIBRARY": "{vulkan}"})


CPUS = len(os.sched_getaffinity(0))
USES = {
    "demo": Use(("-m", "moescope", *GENERATE, "--prefill-backend", "htp")),
    "demo-small-cache": Use(("-m", "moescope", *GENERATE, "--expert-cache", "1.2MiB", "--prefetch", "off")),
    "llama": steps("moe", "20,1,7", 20, 2),
    "llama-one-thread": steps("wide", "64", 20, 1),
    "server": use_server(3, 5),
    "server-one-slot": use_server(1, 3),
    "speculative": use_server(1, 2, "dense"),
    "speculative-accepted": use_server(2, 3, "moe"),
    "vulkan-half": use_vulkan(2),
    "vulkan-most": use_vulkan(3),
    "overloaded": steps("wide", "20", 12, 2 * CPUS, beside=CPUS),
    "overloaded-few-threads": steps("moe", "20", 12, CPUS, beside=2 * CPUS),
}


def model_path(folder: Path, name: str) -> str:
    """The file or folder that stands for {name}, made on first use in `folder`."""
    if name == "vulkan":
        return str(next(library_folder("x64-vulkan").glob("libllama.*.so")))
    path = folder / name
    if not path.exists() and name == "demo":
        subprocess.run([sys.executable, "-m", "moescope", "convert", "demo", str(path)], cwd=ROOT, check=True, stdout=sys.stderr)
    elif not path.exists():
        WRITE[name](path)
    return str(path)


class Models(dict[str, str]):
    """Names → paths, made when they are looked up."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def __missing__(self, name: str) -> str:
        return model_path(self.folder, name)


@contextlib.contextmanager
def background_load(programs: int) -> Iterator[None]:
    """So many other programs that always compute."""
    with contextlib.ExitStack() as stack:
        for _ in range(programs):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(process.kill)
        yield


def record_use(folder: Path, name: str, models: Path, levels: str = "token,graph,operator,expert,qnn,sched,io") -> Path:
    """The recording `folder`/`name` of a use; raises RuntimeError if its program or the tracer fails."""
    use, paths = USES[name], Models(models)

    def fill(text: str) -> str:
        return text.format_map(paths)

    environment = {**os.environ, **{key: fill(value) for key, value in use.environment.items()}}
    options = ["--no-views", "--levels", levels, "-o", str(folder / name)]
    command = [sys.executable, "-m", "tracer", "run", *options, "--", sys.executable, *map(fill, use.command)]
    with background_load(use.beside):
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=180)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-1000:]}")
    return folder / name


def main() -> None:
    if sys.argv[1:] == ["--list"]:
        print("\n".join(USES))
        return
    folder = Path(sys.argv[1])
    for name in sys.argv[2:] or USES:
        print(record_use(folder.resolve(), name, folder.resolve() / "models"), flush=True)


if __name__ == "__main__":
    main()
