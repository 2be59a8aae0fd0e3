"""A guest whose processor is capped by its own thermal zone, recorded by moescope-recorder: clocks and heat of a real kernel.

    python -m tests.vm.heat [SERIES]

heat.asl gives QEMU's machine what it lacks: frequencies, and a zone that warms and cools. Needs iasl (acpica-tools).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from analyzer.questions import clocks
from analyzer.tables.store import build_tables
from tests.vm import bare
from tests.vm.guest import GUESTS, HERE, make_kernel, module_of
from tracer.recording.format import Recording

WHAT = {"frequency", "greatest frequency", "least frequency", "temperature", "cooling"}
COMMAND = "/bin/busybox sh -c 'for i in 1 2 3 4 5 6; do /bin/usdt_calls 20; sleep 5; done'"
PROCESSOR = "max,vendor=GenuineIntel,family=6"  # of AMD's, as QEMU has it else, acpi-cpufreq takes none


def main(series: str = "6.12") -> int:
    """Record half a minute in the guest; 1 where it was not capped, or the kernel told nothing of it."""
    guest = next(guest for guest in GUESTS if guest.arch == "amd64" and guest.series == series)
    if not guest.kernel.exists():
        make_kernel(guest)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        place, out = work / "guest", work / "out"
        place.mkdir()
        out.mkdir()
        bare.furnish(guest, place)
        (place / "acpi-cpufreq.ko").write_bytes(module_of(guest.kernel, "acpi-cpufreq") or b"")
        subprocess.run(["iasl", "-p", work / "heat", HERE / "heat.asl"], capture_output=True, check=True)
        more = ["-cpu", PROCESSOR, "-acpitable", f"file={work}/heat.aml", "-device", "pc-testdev"]
        more += ["-append", "console=ttyS0 quiet panic=-1 no_timer_check"]
        before = "/bin/busybox insmod /acpi-cpufreq.ko"
        bare.boot(guest, place, [], out, before, more)
        bare.write_plans(place, json.loads((out / "features.json").read_text()), work)
        bare.COMMANDS["sites"] = COMMAND
        bare.boot(guest, place, ["sites"], out, before, more)
        return said(Recording(out / "sites"))


def said(recording: Recording) -> int:
    """Print what the recording holds of clocks and heat; the exit code."""
    tables = build_tables(recording)
    hits = {row["symbol"]: row["hits"] for row in recording.manifest["probes"] if row["level"] == "heat"}
    caps = clocks.frequency_caps(tables)
    print(hits, sorted(set(tables["clocks"]["what"])), [cap.text for cap in caps], recording.manifest["lost"] or "nothing lost")
    return int(not (caps and len(hits) == 4 and all(hits.values()) and set(tables["clocks"]["what"]) == WHAT))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
