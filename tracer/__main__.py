"""python -m tracer: the verbs that record, from a checkout."""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported ends it without a traceback

from moescope.environment import enter_project_environment
from moescope.verbs import tracer_program

main = tracer_program().main

if __name__ == "__main__":
    enter_project_environment("tracer")
    sys.exit(main())
