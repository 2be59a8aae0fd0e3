"""python -m tracer: watch an engine from outside, into a recording."""

import sys

from moescope.command_line import Room
from moescope.environment import enter_project_environment

VERBS = {
    "run": "trace a command, from its first instruction to its end",
    "attach": "trace a process that runs already",
    "compare": "trace two commands alternately until it is clear which is faster, and where",
    "probes": "show every probe that would be placed, and why there",
    "plan": "write down what to attach, for a machine without Python",
    "doctor": "list what the tracer needs, what is there, and how to get the rest",
}
ROOM = Room("tracer", "Watch an inference engine from outside and record what it does. Needs root.", VERBS)
main = ROOM.main

if __name__ == "__main__":
    enter_project_environment("tracer")
    sys.exit(main())
