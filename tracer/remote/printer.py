"""Output of devices while they record: a line of progress for each, and what their programs print."""

import re
import sys
import threading
import time
from typing import Any, BinaryIO

from moescope.plain import one_line, plain_text

PROGRESS = re.compile(r"moescope: (\d+ s, \d+ steps, .*)")
SPARSE_S = 5.0  # in a log


class ProgressLines:
    """The devices' lines of progress: rewritten in place on a terminal, elsewhere printed at intervals."""

    def __init__(self) -> None:
        self.latest: dict[str, str] = {}
        self.shown: dict[str, float] = {}
        self.lock = threading.Lock()
        self.live: Any = None
        if sys.stderr.isatty():
            from rich.live import Live

            from moescope.terminal import console

            self.live = Live(console=console(stderr=True), auto_refresh=False, transient=True)
            self.live.start()

    def progress(self, name: str, line: str) -> None:
        """A device's newest line."""
        with self.lock:
            self.latest[name] = f"{name}: {plain_text(line)}"
            if self.live:
                self.live.update("\n".join(self.latest.values()), refresh=True)
            elif time.monotonic() - self.shown.get(name, -SPARSE_S) >= SPARSE_S:
                self.shown[name] = time.monotonic()
                print(f"moescope: {self.latest[name]}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erase the lines to make room for other output; the next line of progress restores them."""
        if self.live:
            with self.lock:
                self.live.update("", refresh=True)

    def close(self) -> None:
        """Erase the lines for good."""
        if self.live:
            self.live.stop()


class Printer:
    """One device's output: unchanged if it is the only device, otherwise whole lines prefixed with its name."""

    def __init__(self, name: str, lines: ProgressLines, alone: bool):
        self.name, self.lines, self.alone = name, lines, alone
        self.parts: dict[str, bytes] = {"output": b"", "messages": b""}

    def say(self, text: object) -> None:
        """Print one of our lines, prefixed with the device's name, with which most errors begin anyway."""
        self.lines.clear()
        line = one_line(text) if str(text).startswith(self.name) else f"{plain_text(self.name)}: {one_line(text)}"
        print(f"moescope: {line}", file=sys.stderr, flush=True)

    def progress(self, line: str) -> None:
        """Show the device's progress."""
        self.lines.progress(self.name, line)

    def output(self, data: bytes) -> None:
        """Pass on the standard output of its program."""
        if self.alone:
            self.lines.clear()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            self._lines("output", data, sys.stdout.buffer)

    def messages(self, data: bytes) -> None:
        """Pass on messages of its program and recorder; progress lines are shown as progress."""
        self._lines("messages", data, sys.stderr.buffer)

    def _lines(self, kind: str, data: bytes, file: BinaryIO) -> None:
        *lines, self.parts[kind] = (self.parts[kind] + data).split(b"\n")
        prefix = b"" if self.alone else f"{plain_text(self.name)}: ".encode()
        for line in lines:
            if kind == "messages" and (shown := PROGRESS.fullmatch(line.decode(errors="replace"))):
                self.progress(shown[1])
            else:
                self.lines.clear()
                file.write(prefix + line + b"\n")
                file.flush()
