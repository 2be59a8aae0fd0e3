"""python -m analyzer: what a recording says."""

import argparse
import gc
import importlib
import sys

COMMANDS = {
    "summary": "numbers of a recording on one screen",
    "tables": "write the tables as Parquet",
    "query": "SQL over the tables",
    "phases": "where every moment of a token goes",
    "findings": "what costs most, in words, with the size of the prize",
    "threads": "states, balance, and who took the CPU",
    "trends": "spread, drift, jumps and growth across tokens",
    "roofline": "what bounds the operators",
    "fidelity": "measured times against a truth",
    "ceilings": "what this machine can do at most",
    "dag": "one token's operators as a graph",
    "npu": "graphs, experts and nodes on the NPU, and whether its numbers add up",
    "import-qnn": "read QNN profiles that others wrote: CSV, optrace",
    "experts": "expert activation, hits, reuse",
    "predict": "what a step should take on a device, from a model's config",
    "simulate": "replay recorded routes with other settings or on another device",
    "steps": "decode steps predicted from the ones before them",
    "kernels": "what kernels cost by shape: train, predict, fusion",
    "quantization": "what a quantized model gained in speed against what it lost",
    "prompts": "a subset of prompts with the whole's token lengths",
    "device": "device profiles: list, show, measure this machine",
    "compare": "what changed between two groups of runs, and how sure that is",
    "history": "results of many builds, and where they changed",
}
"""Verb → help. The module analyzer.commands.<verb> has prepare_parser(parser) and run(args) -> exit code."""


def parser_for(verb: str | None) -> argparse.ArgumentParser:
    """The parser with all verbs; only the module of the verb in use is imported."""
    parser = argparse.ArgumentParser(
        prog="python -m analyzer", description="Turn a recording into tables and numbers. Needs no root."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in COMMANDS.items():
        module = importlib.import_module(f"analyzer.commands.{name.replace('-', '_')}") if name == verb else None
        sub = verbs.add_parser(
            name,
            help=text,
            description=module.__doc__ if module else text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module:
            module.prepare_parser(sub)
            sub.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb: 0 good, 1 a finding, 2 wrong use or an unreadable recording."""
    words = sys.argv[1:] if argv is None else argv
    verb = next((word for word in words if word in COMMANDS), None)
    from analyzer.errors import AnalysisError
    from tracer.recording.format import RecordingError

    try:
        args = parser_for(verb).parse_args(words)
        return int(args.run(args))
    except (RecordingError, AnalysisError) as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"error: {error.filename or ''}: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    code = main()
    gc.freeze()  # spares the last collections, which with pandas loaded take a fifth of a second
    sys.exit(code)
