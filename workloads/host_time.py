"""Measures the CPU time that the host of a virtual machine takes."""

from pathlib import Path

MOST_STOLEN = 0.02
"""Maximum share of the CPUs' time taken by the host: above it, threads that have their CPU are interrupted too
often to be timed."""


class HostTime:
    """The host's share of the CPUs' time since this object was created, which the guest's scheduler does not see."""

    def __init__(self) -> None:
        self.stolen, self.whole = self._read()

    def share(self) -> float:
        """The share, between 0 and 1."""
        stolen, whole = self._read()
        return (stolen - self.stolen) / max(whole - self.whole, 1)

    def _read(self) -> tuple[int, int]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return ticks[7], sum(ticks)
