"""python -m views: files to look at."""

import sys

from moescope.command_line import Room

COMMANDS = {
    "write": "write timeline, report and ProfDAG page of a recording",
    "trace": "write the Perfetto timeline only",
    "report": "write the report only",
    "dag": "write one token's operators as an interactive page",
    "regression": "write the report of a comparison",
    "pareto": "write a simulated sweep: memory against time",
    "open": "serve the timeline to the Perfetto UI in the browser",
    "export": "write Chrome JSON, CSV, Parquet or GraphML for other tools",
    "queries": "print PerfettoSQL for the timeline: tokens, slow tokens, NPU idle time, expert loads",
    "top": "show live figures of a recording in progress",
    "summary": "summary of a finished recording on one screen",
}
ROOM = Room("views", "Write views of a recording. Needs no root.", COMMANDS)
main = ROOM.main

if __name__ == "__main__":
    sys.exit(main())
