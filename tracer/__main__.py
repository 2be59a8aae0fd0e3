"""python -m tracer: watch an engine from outside, into a recording."""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported ends it without a traceback

from moescope.command_line import Room
from moescope.environment import enter_project_environment
from tracer.errors import FAILED

VERBS = {
    "run": "trace a command, from its first instruction to its end",
    "attach": "trace a process that is already running",
    "compare": "trace two commands alternately until it is clear which is faster, and where",
    "probes": "show every probe that would be placed, with the reason for its address",
    "plan": "write a plan of probes for a machine without Python",
    "doctor": "check the tracer's requirements, with a remedy for each missing one",
}
ROOM = Room(
    "tracer", "Trace an inference engine from outside and record what it does. Needs root.", VERBS, failures={"run": FAILED}
)
main = ROOM.main

if __name__ == "__main__":
    enter_project_environment("tracer")
    sys.exit(main())
