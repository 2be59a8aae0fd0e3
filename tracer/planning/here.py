"""Recording on this machine: the recorder, which alone keeps root, and the planner at the other end of its socket."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracer.errors import RequirementError, TracerError
from tracer.kernel.bcc_helper import launcher_words
from tracer.kernel.features import option_state
from tracer.kernel.plan_file import FileRoot
from tracer.kernel.trial import recorder_path
from tracer.planning.answers import Answers, Message
from tracer.planning.loops import KeptLoops
from tracer.probes import reach
from tracer.probes.named import NamedFunctions
from tracer.probes.planner import Planner
from tracer.recording.paths import BPF_SOURCE, Owner
from tracer.traced_program import model_config, models

PIECE = 1 << 16
KERNEL_LEVELS = {"sched", "io"}
"""These need no probe in a program."""


@dataclass
class Recorder:
    """The running recorder, with the socket to it."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    stopped_by: int = 0
    """The last signal that was passed on."""
    _unsent: int = 0
    _sending: bool = False
    _rest: bytes = b""
    _handed: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, options: list[str], loader: str = "libbpf") -> "Recorder":
        """Start the recorder, with this process's rights; it waits for its plan. `options` end with what names the target."""
        ours, its = socket.socketpair()
        with its:
            pipe = ["--planner", f"{its.fileno()},{its.fileno()}"]
            command = [*(launcher_words(BPF_SOURCE) if loader == "bcc" else []), str(recorder_path()), *pipe, *options]
            return cls(subprocess.Popen(command, pass_fds=[its.fileno()]), ours)

    def messages(self) -> Iterator[Message]:
        """Its messages until it ends."""
        while True:
            with contextlib.suppress(ConnectionResetError):
                data, handed, _, _ = socket.recv_fds(self.link, PIECE, 1)
                self._handed += handed
                *lines, self._rest = (self._rest + data).split(b"\n")
                yield from map(self._read, lines)
                if data:
                    continue
            return

    def _read(self, line: bytes) -> Message:
        """A message. The file that it asks about may be one that only the recorder can open: it hands over a descriptor."""
        message: Message = json.loads(line)
        if "path" in message:
            handed, path = self._handed.pop(0) if message["handed"] else -1, message["path"]
            opens, is_link = os.access(path, os.R_OK), path.startswith("/proc/")  # it ends with its process
            if handed >= 0 and (is_link or not opens):
                reach.remember_path(path, f"/proc/self/fd/{handed}")
            elif handed >= 0:
                os.close(handed)
            elif is_link:
                reach.remember_path(path, path)
        return message

    def send(self, message: Message) -> None:
        """Answer, or order; a recorder that has ended meanwhile needs neither."""
        self._sending = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.link.sendall(json.dumps(message).encode() + b"\n")
        self._sending = False
        if self._unsent:
            self._pass_on()

    def stop(self, number: int, *_: object) -> None:
        """Have the recorder do what this signal would do; callable from a signal's handler."""
        self.stopped_by = self._unsent = number
        if not self._sending:
            self._pass_on()

    def _pass_on(self) -> None:
        number, self._unsent = self._unsent, 0
        self.send({"stop": int(number)})


@dataclass
class Attendance:
    """The planner's part in one recording: what it answers, and what it adds to the manifest."""

    recorder: Recorder
    planner: Planner
    command: list[str]
    folder: Path
    """The folder of relative paths on the command line."""
    manifest: dict[str, Any]
    """What the command line adds to the manifest."""
    loops: KeptLoops
    show: Callable[[Message], None]
    written: Callable[[], None]
    """Called when the recording is complete; a command that outlives it may run on."""
    model_files: list[Path] = field(default_factory=list)
    _looked: bool = False
    _cpu_before_ns: int = 0

    def run(self) -> int:
        """Answer the recorder to its end; returns its exit status, -N if signal N ended it."""
        messages = self.recorder.messages()
        machine = next(messages, {"machine": None})["machine"]
        if machine:
            self.adapt(machine)
            said = list(self.planner.warnings)
            answers = Answers(self.planner, FileRoot("", machine["arch"]), self.loops.known(), self.loops.keep)
            self.recorder.send({**answers.plan(), "planner_pid": os.getpid(), "manifest": self.manifest | self._model()})
            self.recorder.send({"warnings": said})
            self._cpu_before_ns = time.process_time_ns()
            self._look_ahead(answers)
            for message in messages:
                self._react(answers, message)
        return self.recorder.process.wait()

    def adapt(self, machine: Message) -> None:
        """Leave out what this machine's kernel cannot record. Raises RequirementError if nothing is left."""
        self.planner.fast_nop = lambda: bool(machine["fast_nop"])
        if machine["uprobes"]:
            return
        option = option_state("CONFIG_UPROBE_EVENTS")
        self.planner.levels &= KERNEL_LEVELS
        if not self.planner.levels:
            raise RequirementError(f"this kernel has no uprobes ({option}), so only the levels sched and io are available")
        self.planner.engines, self.planner.named = [], NamedFunctions([])
        self.planner.warnings.append(
            f"this kernel has no uprobes ({option}): no engine is recorded, only the levels sched and io"
        )

    def _model(self) -> dict[str, Any]:
        self.model_files = models.models_named(self.command, self.folder)
        return {"model": model_config.of_command(self.command)}

    def _look_ahead(self, answers: Answers) -> None:
        """Search the programs that the command names while the recorder loads its own: later the target waits for it."""
        for number, word in enumerate(self.command):
            path = shutil.which(word)
            if path and not answers.is_probed(path) and number == 0:  # others may be libraries, opened and not executed
                self.recorder.send(answers.without_probes(path))

    def _react(self, answers: Answers, message: Message) -> None:
        if "progress" in message:
            self._look_for_model(message["progress"])
            self.show(message["progress"])
            for order in answers.moves(message["progress"]["hits"], message["progress"]["levels"]):
                self.recorder.send(order)
        elif "end" in message:
            models_used, cpu_ns = models.model_rows(self.model_files), time.process_time_ns() - self._cpu_before_ns
            last = {"manifest": {"models": models_used}, "warnings": self.planner.named.missing(), "planner_cpu_ns": cpu_ns}
            self.recorder.send({"answer": message["ask"], **last})
        elif "written" in message:
            self.written()
        elif answer := self._answer(answers, message):
            self.recorder.send(answer)

    def _look_for_model(self, progress: Message) -> None:
        if not self.model_files and not self._looked and progress["steps"]:
            self.model_files, self._looked = models.largest_in_use(progress["pid"]), True

    def _answer(self, answers: Answers, message: Message) -> Message | None:
        try:
            return answers.answer(message)
        except (TracerError, OSError) as error:
            return {"answer": message["ask"], "warnings": [str(error)]} if "ask" in message else None


def give_up_root(owner: Owner) -> None:
    """From now on, this process has the rights of the user who called sudo."""
    if os.geteuid() == 0 and owner.uid:
        os.environ.update(owner.environment())
        owner.become()
