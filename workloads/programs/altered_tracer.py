"""`moescope` with another recorder, or another source of its programs for BCC.

altered_tracer.py [--recorder FILE] [--source FILE] run ...
"""

import argparse
import sys
from pathlib import Path

from tracer.__main__ import main
from tracer.kernel import trial
from tracer.planning import here

parser = argparse.ArgumentParser()
parser.add_argument("--recorder", type=Path, default=trial.recorder_path())
parser.add_argument("--source", type=Path, default=here.BPF_SOURCE)
args = parser.parse_args(sys.argv[1 : sys.argv.index("run")])
sys.argv = ["tracer", *sys.argv[sys.argv.index("run") :]]
here.recorder_path = lambda: args.recorder
here.BPF_SOURCE = args.source
sys.exit(main())
