"""`python -m tracer` as if on another kernel.

    altered_tracer.py [--bpf FOLDER] [--without CATEGORY] [--without-cookies] [--without-btf] [--without-uprobes] run ...

--bpf takes the BPF sources and objects from another folder; --without denies the tracepoints of a category.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from tracer import session
from tracer.__main__ import main
from tracer.kernel import features, libbpf, loaders
from tracer.kernel.features import Offered
from tracer.probes import attach, kernel_probes, tracefs


def use_folder(folder: Path) -> None:
    loaders.BPF_OBJECTS["ring"] = folder / "moescope.bpf.o"
    loaders.BPF_SOURCE = folder / "moescope.bpf.c"


def deny(denied: str) -> None:
    def has(category: str, name: str) -> bool:
        return category != denied and tracefs.has_tracepoint(category, name)

    attach.kernel_probes = partial(kernel_probes.kernel_probes, has=has)


parser = argparse.ArgumentParser()
parser.add_argument("--bpf", type=Path)
parser.add_argument("--without", default="")
for name in ("cookies", "btf", "uprobes"):
    parser.add_argument(f"--without-{name}", action="store_true")
args = parser.parse_args(sys.argv[1 : sys.argv.index("run")])
sys.argv = ["tracer", *sys.argv[sys.argv.index("run") :]]
if args.bpf:
    use_folder(args.bpf)
if args.without:
    deny(args.without)
if args.without_cookies:
    libbpf.offered = lambda lib: Offered(task_btf=False, cookies=False)
if args.without_btf:
    loaders.VMLINUX = features.VMLINUX = Path("/nonexistent/btf")
if args.without_uprobes:
    session.has_uprobes = lambda: False
sys.exit(main())
