"""The command line: python -m runtime <verb>."""

import argparse
import sys
from importlib import import_module

VERBS = {
    "generate": "generate text with a Mixture-of-Experts model on CPU and NPU",
    "chat": "talk with a model",
    "bench": "measure prefill and decode speed, as llama-bench",
    "convert": "convert a Hugging Face model into a package of subgraphs",
    "tune": "measure what runs fastest where, for placement by itself",
    "train-predictor": "learn which experts a model chooses, for prefetching",
    "inspect": "show what a model or package holds",
    "demo-model": "write a small model to try things with",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0 good, 1 a finding, 2 wrong use."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m runtime", description="A Mixture-of-Experts engine for CPU and NPU.")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
    for verb, summary in VERBS.items():
        sub = verbs.add_parser(verb, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if verb in arguments[:1]:
            command = import_module(f"runtime.commands.{verb.replace('-', '_')}")
            sub.epilog = command.EXAMPLES
            command.prepare_parser(sub)
    parsed = parser.parse_args(arguments)
    from runtime.errors import MoEError
    from runtime.telemetry.probes import guard_mapped_files

    guard_mapped_files()
    try:
        code: int = import_module(f"runtime.commands.{parsed.verb.replace('-', '_')}").run(parsed)
    except MoEError as error:
        print(f"moescope: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
