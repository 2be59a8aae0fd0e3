"""The command line: one module per verb, each with `prepare_parser(parser)` and `run(args) -> exit code`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tracer.errors import TracerError
from tracer.recording.format import RecordingError


def dispatch(program: str, verbs: dict[str, str], load: Callable[[str], Any], argv: Sequence[str] | None = None) -> int:
    """Run one verb; its module is imported only when it is used. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    choices = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, summary in verbs.items():
        sub = choices.add_parser(verb, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if verb in words[:1]:
            module = load(verb)
            sub.epilog = module.EXAMPLES
            module.prepare_parser(sub)
    try:
        args = parser.parse_args(words)
        if getattr(args, "config", None):
            args = parser.parse_args(words)  # again, over the defaults that the file has set
        return int(module.run(args))
    except (TracerError, RecordingError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
