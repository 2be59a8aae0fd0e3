"""Turn a profile that a program wrote itself into a recording, for `summary`, `time`, `report` and the other verbs.

Supported: ONNX Runtime's profile (SessionOptions.enable_profiling; `end_profiling` returns its path), ExecuTorch's ETDump
(write_etdump_result_to_file) and the log of llama.cpp's Hexagon backend with GGML_HEXAGON_PROFILE=1 or 2 and llama.cpp's debug
messages on. Columns that a profile lacks are empty in the tables, and the summary lists them.

examples:
  python -m analyzer import-profile onnxruntime_profile.json --out recordings/imported
  python -m analyzer import-profile model.etdp --out recordings/executorch
  python -m analyzer import-profile hexagon.log --out recordings/npu
  python -m analyzer time recordings/imported
"""

import argparse
from pathlib import Path

from analyzer.imports import etdump, hexagon, onnxruntime
from analyzer.imports.csv import decoded
from analyzer.imports.run_folder import Run, write_run
from moescope.plain import print_plain
from tracer.recording.format import RecordingError

READERS = ((onnxruntime.is_profile, onnxruntime.read_profile), (hexagon.is_log, hexagon.read_log))


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the profile, or a log that contains it")
    parser.add_argument("--out", metavar="RUN", type=Path, required=True, help="folder of the new recording")


def run(args: argparse.Namespace) -> int:
    """Read the profile, write the recording, and print what it lacks."""
    if args.out.exists():
        raise RecordingError(f"{args.out} exists: choose another --out")
    imported = read_file(args.file)
    write_run(args.out, imported, f"import of {args.file.name}", [imported.engine])
    for warning in imported.warnings:
        print_plain(f"not known: {warning}")
    rows = ", ".join(f"{len(frame):,} {name}" for name, frame in imported.tables.items() if len(frame))
    print_plain(f"{args.out}: {rows}")
    return 0


def read_file(path: Path) -> Run:
    """The contents of a profile. Raises RecordingError if the file cannot be read or has an unknown format."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
    if etdump.is_dump(raw):
        return etdump.read_dump(path, raw)
    text = decoded(raw)
    read = next((read for knows, read in READERS if knows(text)), None)
    if read is None:
        known = "ONNX Runtime or ExecuTorch, nor a log of llama.cpp's Hexagon backend with its profile"
        raise RecordingError(f"{path} is not a profile of {known}; for QNN profiles use import-qnn")
    return read(path, text)
