"""Signals that end a program within a second, whatever it does at the moment."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from moescope.command_line import note_interrupt

ENDING = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 0.5
"""How long Python may take to answer a signal before the process ends at once."""


@contextlib.contextmanager
def ended_by_signals(undo: Callable[[], object]) -> Iterator[None]:
    """While active, SIGINT and SIGTERM raise KeyboardInterrupt, at the latest at the block's end.

    If that does not leave the block within half a second, as in a long call of C, `undo` is called in another thread, and the
    process ends with 128 plus the signal's number.
    """
    left, asked = threading.Event(), threading.Event()
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)

    def watch() -> None:
        number = os.read(reading, 1)[0]
        if number:
            asked.set()
        if number and not left.wait(PATIENCE_S):
            try:
                undo()
            finally:
                os._exit(128 + number)

    def ignored(what: Any) -> None:
        if not isinstance(what.exc_value, KeyboardInterrupt):  # C code that called Python cannot pass it on
            report(what)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    report, sys.unraisablehook = sys.unraisablehook, ignored
    handlers = {number: signal.signal(number, note_interrupt) for number in ENDING}
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        left.set()
        sys.unraisablehook = report
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.write(writing, b"\0")  # other processes may hold this end, too: its closing would not be noticed
        watching.join()
        os.close(writing)
        os.close(reading)
    if asked.is_set():
        raise KeyboardInterrupt
