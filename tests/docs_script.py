"""What stands for a reader's own program: steps of the runtime, the slower the more threads it is asked for."""

import sys

from workloads.programs import steps

threads = int(sys.argv[sys.argv.index("--threads") + 1]) if "--threads" in sys.argv else 1
sys.argv[1:] = ["40", str(0.005 * threads)]
steps.main()
