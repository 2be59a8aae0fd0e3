"""python -m runtime inspect: what a model or package holds."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

EXAMPLES = """example:
  python -m runtime inspect /models/qwen3-moe
  python -m runtime inspect --json /models/qwen3-moe.package"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", type=Path, help="folder of a Hugging Face model, or a package")
    parser.add_argument("--json", action="store_true", help="write JSON to standard output")


def run(args: argparse.Namespace) -> int:
    """Show sizes; for a package check every file's hash too. Exit code 1 where a file is damaged."""
    facts = describe(args.path)
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        for key, value in facts.items():
            print(f"{key.replace('_', ' '):<18} {value}")
    return 1 if facts.get("damaged_files") else 0


def describe(path: Path) -> dict[str, Any]:
    """Sizes of the model, and the state of its package."""
    from runtime.checkpoint import Checkpoint, read_config
    from runtime.models import read_family
    from runtime.package import Package, default_target, is_package

    family = read_family(read_config(path), path)
    facts: dict[str, Any] = {"model": str(path), "family": type(family).__name__, **asdict(family)}  # type: ignore[call-overload]
    facts["expert_bytes"] = {"cpu": family.expert_parameters * 4, "htp": family.expert_parameters * 2}
    in_all = family.layers * family.experts
    facts["all_experts_bytes"] = {backend: size * in_all for backend, size in facts["expert_bytes"].items()}
    if not is_package(path):
        facts["tensors"] = len(Checkpoint(path).names)
        path = default_target(path)
    if is_package(path):
        package = Package(path)
        facts["package"] = str(path)
        facts["package_bytes"] = sum(entry["bytes"] for entry in package.manifest["files"].values())
        facts["compiled_for_htp"] = sum(1 for _ in path.glob("htp/*/graph.onnx"))
        facts["damaged_files"] = package.damaged()
    return facts
