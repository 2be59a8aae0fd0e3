"""Recording on this machine: the recorder, which alone has root, and the planner at the other end of its pipe."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tracer.errors import RequirementError
from tracer.kernel.plan_file import FileRoot
from tracer.planning.answers import Answers, Message
from tracer.probes.learning import LearntLoop
from tracer.probes.planner import Planner
from tracer.recording.machine import describe
from tracer.recording.paths import COLLECTORS, Owner
from tracer.target import model_config, models


def recorder_path() -> Path:
    """The recorder for this machine. Raises RequirementError if it was not built."""
    path = COLLECTORS / f"moescope-collect-{describe()['arch']}"
    if not path.exists():
        raise RequirementError(f"{path.name} has not been built: run `make collect`, or install a wheel, which contains it")
    return path


@dataclass
class Loops:
    """What builds were learnt to be, kept by build id in a folder of the user's."""

    folder: Path

    def known(self) -> list[LearntLoop]:
        """All of them; files that cannot be read are left out."""
        found = []
        for path in sorted(self.folder.glob("*.loop")):
            try:
                found.append(LearntLoop(**json.loads(path.read_text())))
            except (OSError, ValueError, TypeError):
                continue
        return found

    def keep(self, loop: LearntLoop) -> None:
        """Keep another one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{loop.id}.loop").write_text(json.dumps(asdict(loop)))


@dataclass
class Recorder:
    """The running recorder, with the pipe to it."""

    process: subprocess.Popen[bytes]
    questions: IO[str]
    answers: IO[str]

    def messages(self) -> Iterator[Message]:
        """Its messages until it ends."""
        for line in self.questions:
            yield json.loads(line)

    def send(self, message: Message) -> None:
        """Answer, or order; a recorder that has ended meanwhile needs neither."""
        try:
            self.answers.write(json.dumps(message) + "\n")
            self.answers.flush()
        except BrokenPipeError:
            pass


def start(options: list[str], words: list[str], owner: Owner) -> Recorder:
    """Start the recorder with root; it waits for its plan."""
    with ExitStack() as ends:
        questions, out = os.pipe()
        into, answers = os.pipe()
        ends.callback(os.close, out)
        ends.callback(os.close, into)
        pipe = ["--planner", f"{out},{into}"]
        command = [str(recorder_path()), *pipe, *options, *(["--", *words] if words else [])]
        process = subprocess.Popen(command, pass_fds=(out, into), env=owner.environment())
    return Recorder(process, os.fdopen(questions), os.fdopen(answers, "w"))


@dataclass
class Attendance:
    """The planner's part in one recording: what it answers, and what it adds to the manifest."""

    recorder: Recorder
    planner: Planner
    command: list[str]
    given: dict[str, Any]
    loops: Loops
    show: Callable[[Message], None]
    model_files: list[Path] = field(default_factory=list)

    def run(self) -> int:
        """Answer the recorder to its end; returns its exit status."""
        messages = self.recorder.messages()
        machine = next(messages, {"machine": None})["machine"]
        if machine:
            self.planner.fast_nop = lambda: bool(machine["fast_nop"])
            answers = Answers(self.planner, FileRoot("", machine["arch"]), self.loops.known(), self.loops.keep)
            self.model_files = models.named(self.command, Path.cwd())
            self.recorder.send(
                {
                    **answers.plan(),
                    "planner_pid": os.getpid(),
                    "manifest": {"options": self.given, "model": model_config.of_command(self.command)},
                }
            )
            for message in messages:
                self._react(answers, message)
        return self.recorder.process.wait()

    def _react(self, answers: Answers, message: Message) -> None:
        if "progress" in message:
            if not self.model_files and message["progress"]["steps"]:
                self.model_files = models.largest_in_use(message["progress"]["pid"])
            self.show(message["progress"])
        elif "end" in message:
            last = {"models": models.describe(self.model_files)}
            self.recorder.send({"answer": message["ask"], "manifest": last, "warnings": self.planner.named.missing()})
        elif answer := answers.answer(message):
            self.recorder.send(answer)
