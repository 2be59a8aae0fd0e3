"""A recording on a device: started independently of the link, followed over it, fetched, and removed there."""

import contextlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from tracer.errors import TracerError
from tracer.remote.device import Device
from tracer.remote.transport import DeviceError, LinkError, transport_to

STATE = "remote.json"
"""The file in a recording's folder while the recording is still on a device; with it, the same command resumes."""
RUNNING = "running"
QUESTIONS, ANSWERS = "questions", "answers"
"""The recorder's end of the planner's pipe: a file that grows, so that a cut link costs nothing, and a named pipe."""
CHUNK = 1 << 16
Sink = Callable[[bytes], None]


@dataclass
class Job:
    """A recording; `pid` is the leader of its process group, 0 before it was started."""

    device: Device
    output: Path
    pid: int = 0

    def save(self) -> None:
        """Note on the host where the recording is being made."""
        way = self.device.way
        state = {"target": way.target, "root": way.root, "folder": self.device.folder}
        (self.output / STATE).write_text(json.dumps(state) + "\n")

    def status(self) -> str:
        """The job's status from its file: `running`, or the recorder's exit code."""
        script = f"read word < {self.device.folder}/status && echo $word; kill -0 {self.pid} || echo ended"
        words = self.device.way.ask(f"({script}) 2> /dev/null; true").split()
        if not words or words == ["ended"]:
            raise TracerError(f"{self.device.way.name}: the recording in {self.device.folder} is gone: was the device restarted?")
        return "killed" if words == [RUNNING, "ended"] else words[0]

    def follow(self, name: str, sink: Sink) -> str:
        """Pass on a growing file of the job until its end; returns the job's status. Resumes after cuts of the link."""
        offset, way = 0, self.device.way
        while (status := way.insist(self.status)) == RUNNING:
            offset += self._copy(name, offset, sink)
        rest = way.insist(lambda: way.ask(f"tail -c +{offset + 1} {self.device.folder}/{name}"))
        sink(rest.encode(errors="surrogateescape"))
        return str(status)

    def _copy(self, name: str, offset: int, sink: Sink) -> int:
        """Pass on the file while the link holds and the job runs; returns the number of bytes received."""
        folder, came = self.device.folder, 0
        script = f"""tail -c +{offset + 1} -f {folder}/{name} &
while read word < {folder}/status && [ "$word" = {RUNNING} ] && kill -0 {self.pid} 2> /dev/null; do sleep 1; done
kill $!"""
        with subprocess.Popen(
            self.device.way.command(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as copying:
            while data := copying.stdout.read1(CHUNK):  # type: ignore[union-attr]
                sink(data)
                came += len(data)
        return came

    def interrupt(self, for_good: bool) -> None:
        """End the recording like Ctrl-C on the device's own terminal; with `for_good`, kill all of its processes at once."""
        with contextlib.suppress(LinkError, DeviceError):
            self.device.way.ask(f"kill -s {'KILL' if for_good else 'INT'} -- -{self.pid}")

    def fetch(self, progress: Callable[[str], None]) -> None:
        """Pull the recording; the manifest comes last, so that a recording with a manifest is whole."""
        place = f"{self.device.folder}/recording"
        script = f"[ ! -d {place} ] || (cd {place} && find . -type f -exec sha256sum {{}} +)"
        lines = self.device.way.insist(lambda: self.device.way.ask(script)).splitlines()
        sums = {name: wanted for wanted, _, name in (line.partition("  ") for line in lines)}
        for name in sorted(sums, key=lambda name: (name == "./manifest.json", name)):
            path = self.output / name
            if ".." in path.parts:
                raise TracerError(f"{self.device.way.name} offers a file {name!r}: it is left alone")
            path.parent.mkdir(parents=True, exist_ok=True)
            progress(f"fetching {name.removeprefix('./')}")
            self.device.way.pull(f"{place}/{name}", path, sums[name])

    def finish(self) -> None:
        """Remove everything from the device, and the host's folder too if nothing was recorded."""
        self.device.clean()
        (self.output / STATE).unlink()
        with contextlib.suppress(OSError):
            self.output.rmdir()


def start_job(device: Device, output: Path, options: list[str], words: list[str]) -> Job:
    """Start the recorder over a command, or over the process in the options; it continues if the link is cut.

    Disk space for the status is reserved before the recording can fill the disk.
    """
    folder = device.folder
    command = " ".join(map(quote, [*options, *(["--", *words] if words else [])]))
    line = f"{device.launcher}{device.recorder} -p {folder}/plan.json --planner 3,4 -o {folder}/recording {command}"
    line += f" 3>> {folder}/{QUESTIONS} 4<> {folder}/{ANSWERS}"
    inner = f"trap : INT TERM; {line} > {folder}/output 2> {folder}/messages; echo $? 1<> {folder}/status"
    script = f"echo {RUNNING} > {folder}/status && : > {folder}/output && : > {folder}/messages && : > {folder}/{QUESTIONS}"
    script += f" && mkfifo {folder}/{ANSWERS} || exit"
    script += f"\nsetsid sh -c {quote(inner)} > /dev/null 2>&1 < /dev/null & echo $! | tee {folder}/pid"
    job = Job(device, output)
    job.save()
    job.pid = int(device.way.ask(script))
    device.let_be()
    return job


def unfetched_job(output: Path, target: str) -> Job | None:
    """The job whose recording belongs in a folder and was not fetched yet; otherwise None."""
    try:
        state = json.loads((output / STATE).read_text())
    except FileNotFoundError:
        return None
    if state["target"] != target:
        raise TracerError(f"{output} belongs to a recording on {state['target']}: give that with --on, or another folder with -o")
    device = Device(transport_to(target, state["root"]), state["folder"])
    pid = device.way.insist(lambda: device.way.ask(f"cat {device.folder}/pid 2> /dev/null || echo 0"))
    job = Job(device, output, int(pid))
    if not job.pid:
        job.finish()
    return job if job.pid else None
