"""How the user called the program, so that hints name commands as the user would type them."""

import os
import re
import sys
from pathlib import Path

VARIABLE = "MOESCOPE_CALLED_AS"
"""Set if the user typed `moescope`; inherited by the rooms' programs that it starts."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Folders in which sudo looks for commands."""
ROOM_VERB = re.compile(r"(sudo )?\bpython3? -m (tracer|analyzer|views|runtime)\b(?: ([a-z][a-z-]*))?")
RENAMED = {("tracer", "compare"): "compare-commands", ("views", "dag"): "profdag"}
"""(room, verb) → name under `moescope`, for words that two rooms use."""


def called_as_moescope(script: str) -> str:
    """Remember that the user typed `moescope` or `python -m moescope`; returns which of them."""
    program = "python -m moescope" if Path(script).name == "__main__.py" else "moescope"
    os.environ[VARIABLE] = program
    return program


def as_called(text: str) -> str:
    """The text with every `python -m ROOM VERB` replaced by `moescope VERB`, if the user typed that."""
    program = os.environ.get(VARIABLE)
    return ROOM_VERB.sub(lambda found: _spelled(found, program), text) if program else text


def _spelled(found: re.Match[str], program: str) -> str:
    sudo, room, verb = found.groups()
    words = [program, RENAMED.get((room, verb), verb)] if verb else [program]
    return " ".join(["sudo", for_sudo(words[0]), *words[1:]] if sudo else words)


def for_sudo(program: str) -> str:
    """The program for a sudo command: its full path if it is outside the system's folders."""
    from shutil import which

    script = Path(sys.argv[0])
    if program != "moescope" or which(program, path=SYSTEM_PATH) or script.name != program:
        return program
    return str(script.absolute())
