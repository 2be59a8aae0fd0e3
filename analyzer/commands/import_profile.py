"""Make a recording of a profile that a program wrote of itself, so that `summary`, `ledger`, `report` and the others read it.

Read are ONNX Runtime's profile (SessionOptions.enable_profiling; `end_profiling` says where it lies) and the log of llama.cpp's
Hexagon backend with GGML_HEXAGON_PROFILE=1 or 2 and llama.cpp's debug messages on. What a profile does not tell is empty in
the tables, and the summary says what that is.

examples:
  python -m analyzer import-profile onnxruntime_profile.json --out recordings/imported
  python -m analyzer import-profile hexagon.log --out recordings/npu
  python -m analyzer ledger recordings/imported
"""

import argparse
from pathlib import Path

from analyzer.imports import hexagon, onnxruntime
from analyzer.imports.csv import text_of
from analyzer.imports.run_folder import write_run
from moescope.plain import print_plain
from tracer.recording.format import RecordingError

READERS = ((onnxruntime.is_profile, onnxruntime.read_profile), (hexagon.is_log, hexagon.read_log))


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the profile, or the log that holds it")
    parser.add_argument("--out", metavar="RUN", type=Path, required=True, help="folder of the recording to make")


def run(args: argparse.Namespace) -> int:
    """Read, write, and say what is not in it."""
    try:
        text = text_of(args.file)
    except OSError as error:
        raise RecordingError(f"{args.file} cannot be read: {error.strerror}") from None
    read = next((read for knows, read in READERS if knows(text)), None)
    if read is None:
        known = "ONNX Runtime, nor a log of llama.cpp's Hexagon backend with its profile"
        raise RecordingError(f"{args.file} is not a profile of {known}; for those of QNN there is import-qnn")
    if args.out.exists():
        raise RecordingError(f"{args.out} exists: choose another --out")
    imported = read(args.file, text)
    write_run(args.out, imported, f"import of {args.file.name}", [imported.engine])
    for warning in imported.warnings:
        print_plain(f"not known: {warning}")
    rows = ", ".join(f"{len(frame):,} {name}" for name, frame in imported.tables.items() if len(frame))
    print_plain(f"{args.out}: {rows}")
    return 0
