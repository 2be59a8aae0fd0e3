"""The planner of a recording on another machine: answers over the link what the recorder there asks."""

import contextlib
import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tracer.errors import TracerError
from tracer.kernel.plan_file import FileRoot
from tracer.planning.answers import Answers, Message
from tracer.probes.planner import Planner
from tracer.remote.device import Device
from tracer.remote.job import ANSWERS
from tracer.remote.sysroot import Sysroot, planning


@dataclass
class Answering:
    """Answers a recorder whose files are laid out below `root` as far as they are known; others are fetched when it asks."""

    device: Device
    planner: Planner
    kept: Sysroot
    root: Path
    present: set[str]
    """The engines of the plan's files."""
    rest: bytes = b""
    link: subprocess.Popen[bytes] | None = None
    answers: Answers = field(init=False)

    def __post_init__(self) -> None:
        place = FileRoot(str(self.root), self.device.features["arch"])
        self.answers = Answers(self.planner, place, self.kept.loops.known(), fetched=self.fetch, present=self.present)

    def fetch(self, path: str, identity: str) -> str:
        """The path here of one of the device's files."""
        place = self.root / path.lstrip("/")
        if not place.exists():
            self.kept.lay_out(self.device, path, identity, self.root)
        return str(place)

    def feed(self, data: bytes) -> None:
        """Answer the whole lines among what the recorder has written; a file that cannot be read is answered with nothing."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            try:
                with planning:
                    reply = self.answers.answer(message)
            except (TracerError, OSError) as error:
                reply = {"answer": message["ask"], "warnings": [str(error)]} if "ask" in message else None
            if reply:
                self.send(reply)

    def send(self, message: Message) -> None:
        """Write a line into the recorder's pipe; over a new connection if the last one was cut."""
        line = json.dumps(message).encode() + b"\n"
        for _ in range(2):
            if not self.link or self.link.poll() is not None:
                script = f"cat > {self.device.folder}/{ANSWERS}"
                self.link = subprocess.Popen(self.device.way.command(script), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert self.link.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.link.stdin.write(line)
                self.link.stdin.flush()
                return

    def close(self) -> None:
        """End the connection."""
        if self.link:
            with contextlib.suppress(BrokenPipeError):
                self.link.communicate()
