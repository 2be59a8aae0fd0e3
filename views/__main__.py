"""python -m views: files to look at."""

import argparse
import importlib
import sys

COMMANDS = {
    "write": "the timeline, the report and the ProfDAG page of a recording",
    "trace": "the timeline alone, for Perfetto",
    "report": "the report alone",
    "dag": "one token's operators as an interactive page",
    "regression": "the report of a comparison",
    "pareto": "a simulated sweep: memory against time",
    "open": "serve the timeline to the Perfetto UI in the browser",
    "export": "Chrome JSON, CSV, Parquet or GraphML for other tools",
    "queries": "PerfettoSQL for the timeline: tokens, slow tokens, NPU idle time, expert loads",
    "top": "what a recording that is being made shows right now",
    "summary": "what a finished recording shows, on one screen",
}
"""Verb → help. The module views.commands.<verb> has prepare_parser(parser) and run(args) -> exit code."""


def parser_for(verb: str | None) -> argparse.ArgumentParser:
    """The parser with all verbs; only the module of the verb in use is imported."""
    parser = argparse.ArgumentParser(prog="python -m views", description="Make files to look at from a recording. Needs no root.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in COMMANDS.items():
        module = importlib.import_module(f"views.commands.{name}") if name == verb else None
        form = argparse.RawDescriptionHelpFormatter
        sub = verbs.add_parser(name, help=text, description=module.__doc__ if module else text, formatter_class=form)
        if module:
            module.prepare_parser(sub)
            sub.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb: 0 good, 2 wrong use or an unreadable recording."""
    words = sys.argv[1:] if argv is None else argv
    verb = next((word for word in words if word in COMMANDS), None)
    from analyzer.errors import AnalysisError
    from tracer.recording.format import RecordingError
    from views.errors import ViewError

    try:
        args = parser_for(verb).parse_args(words)
        return int(args.run(args))
    except (RecordingError, AnalysisError, ViewError) as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"error: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
