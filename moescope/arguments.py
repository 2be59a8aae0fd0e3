"""Arguments that many verbs share: the same name, type and help text everywhere."""

import argparse
from pathlib import Path

PHASES = ("prefill", "decode")


def add_run(parser: argparse.ArgumentParser, newest: bool = False) -> None:
    """Declare RUN as `args.run_dir`; with `newest` it may be omitted."""
    if newest:
        parser.add_argument("run_dir", metavar="RUN", nargs="?", type=Path, help="default: the newest folder under recordings/")
    else:
        parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording")


def add_run_and_json(parser: argparse.ArgumentParser) -> None:
    """Declare RUN and `--json`, the only arguments of many verbs."""
    add_run(parser)
    add_json(parser)


def add_model(parser: argparse.ArgumentParser, name: str = "model") -> None:
    """Declare a model as `args.model`, or under another name."""
    parser.add_argument(name, type=Path, help="folder of a Hugging Face model, or of a package that `convert` made")


def add_json(parser: argparse._ActionsContainer) -> None:
    """Declare `--json`."""
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def add_out(parser: argparse.ArgumentParser, default: str | Path, metavar: str = "FILE") -> None:
    """Declare `--out` with a default path, or with None and a text that describes what happens without the option."""
    path = default if isinstance(default, Path) else None
    parser.add_argument("--out", metavar=metavar, type=Path, default=path, help=f"where to write (default: {default})")


def add_step(parser: argparse.ArgumentParser) -> None:
    """Declare `--step`, also spelt `--token`, None by default."""
    text = "its token_id (default: the middle decode step, else the first step with operators)"
    parser.add_argument("--step", "--token", metavar="N", type=int, help=text)


def add_phase(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Declare `--phase`; unless required, None by default, for all steps."""
    text = "steps of this phase" if required else "only steps of this phase (default: all)"
    parser.add_argument("--phase", choices=PHASES, required=required, help=text)


def add_ceilings(parser: argparse.ArgumentParser) -> None:
    """Declare `--ceilings`, None by default."""
    parser.add_argument("--ceilings", metavar="FILE", type=Path, help="ceilings of the machine that ran the model")
