"""python -m views: files to look at."""

import sys

from moescope.command_line import Room

COMMANDS = {
    "write": "the timeline, the report and the ProfDAG page of a recording",
    "trace": "write the Perfetto timeline only",
    "report": "write the report only",
    "dag": "one token's operators as an interactive page",
    "regression": "the report of a comparison",
    "pareto": "a simulated sweep: memory against time",
    "open": "serve the timeline to the Perfetto UI in the browser",
    "export": "Chrome JSON, CSV, Parquet or GraphML for other tools",
    "queries": "PerfettoSQL for the timeline: tokens, slow tokens, NPU idle time, expert loads",
    "top": "live figures of a recording in progress",
    "summary": "summary of a finished recording on one screen",
}
ROOM = Room("views", "Make files to look at from a recording. Needs no root.", COMMANDS)
main = ROOM.main

if __name__ == "__main__":
    sys.exit(main())
