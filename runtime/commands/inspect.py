"""moescope inspect: what a model or package holds."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moescope.answers import print_if_json
from moescope.arguments import add_json, add_model
from moescope.plain import print_plain

EXAMPLES = """example:
  moescope inspect /models/qwen3-moe
  moescope inspect --json /models/qwen3-moe.package"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser, "path")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show sizes; for a package check every file's hash too. The exit code is 1 if a file is damaged."""
    facts = describe_model(args.path)
    if not print_if_json(args, facts):
        for key, value in facts.items():
            print_plain(f"{key.replace('_', ' '):<18} {value}")
    return 1 if facts.get("damaged_files") else 0


def describe_model(path: Path) -> dict[str, Any]:
    """Sizes of the model, and the state of its package."""
    from runtime.backends.instruction_sets import LIBRARY, instruction_set, instruction_sets
    from runtime.graphs.checkpoint import Checkpoint, read_config
    from runtime.models import read_family
    from runtime.package.layout import Package, default_target, is_package
    from runtime.placement.costs import COSTS

    family: Any = read_family(read_config(path), path)
    facts: dict[str, Any] = {"model": str(path), "family": type(family).__name__, **asdict(family)}
    if LIBRARY.exists():
        facts |= {"instruction_set": instruction_set(), "instruction_sets": instruction_sets()}
    facts["rope"] = {"dims": family.rope.dims, "scale": family.rope.scale, "interleaved": family.rope.interleaved}
    facts |= {"dense": sorted(family.dense), "expert_parameters": family.expert_parameters}
    if not is_package(path):
        facts["tensors"] = len(Checkpoint(path).names)
        path = default_target(path)
    if is_package(path):
        package = Package(path, verify=False)
        facts["package"] = str(path)
        facts["package_bytes"] = sum(entry["bytes"] for entry in package.manifest["files"].values())
        facts["precisions"] = package.manifest["precisions"]
        quantized = package.manifest["precisions"]["experts"]["bits"] < 16
        on_npu = package.expert_bytes if quantized else family.expert_parameters * 2
        facts["expert_bytes"] = {"cpu": package.expert_bytes, "htp": on_npu if package.portable else None}
        facts["all_experts_bytes"] = package.all_experts_bytes
        facts["compiled_for_htp"] = sum(1 for _ in path.glob("htp/*/graph.onnx"))
        facts["compiled_ahead"] = package.manifest.get("compiled")
        facts["tuned"] = (path / COSTS).exists()
        facts["damaged_files"] = package.damaged()
    return facts
