"""`--on ssh:` into a guest without Python: busybox, dropbear as many boards have it, another kernel, another architecture.

    python -m tests.vm.over_ssh [--arch ARCH] [--kernel SERIES]

Nothing is in the guest but an engine's files and a shell: the recorder, the plan and the recording go over the link.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.vm.bare import CALLS, MEMORY_MIB, furnish
from tests.vm.guest import (
    CACHE,
    CONFIG,
    GUESTS,
    MACHINES,
    ROOT,
    Guest,
    Unobtainable,
    apt_of,
    make_kernel,
    module_of,
    pack,
    qemu,
    run,
    unpack,
)
from workloads.raw_records import RawRecording

MODULES = (
    *(
        "virtio",
        "virtio_ring",
        "virtio_pci_legacy_dev",
        "virtio_pci_modern_dev",
        "virtio_pci",
        "failover",
        "net_failover",
        "virtio_net",
    ),
)
PACKAGES = ("dropbear-bin", "libtomcrypt1", "libtommath1", "libgmp10", "libcrypt1", "zlib1g")
FIRST = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /var/tmp /etc/dropbear /run
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for turn in 1 2 3; do for each in /modules/*; do insmod $each 2> /dev/null; done; done
ip addr add 10.0.2.15/24 dev eth0
ip link set eth0 up
chmod 700 /root /root/.ssh
exec dropbear -R -F -E
"""
READY_S, PATIENCE_S = 600, 900


def lay_out(guest: Guest, place: Path, key: Path) -> None:
    """What the guest holds: the engine's files of tests/vm/bare.py, a daemon for ssh, its network's modules."""
    furnish(guest, place)
    (place / "collect").unlink()
    unpacked = CACHE / guest.arch / "dropbear"
    if not unpacked.exists():
        conf = apt_of(guest.arch, "apt-root", CONFIG["root_suites"])
        with tempfile.TemporaryDirectory() as folder:
            run("apt-get", "-c", conf, "download", "-qq", *PACKAGES, cwd=folder)
            unpack(sorted(Path(folder).glob("*.deb")), unpacked)
    for path in (*unpacked.glob("**/*.so.*"), *unpacked.glob("**/sbin/dropbear")):
        shutil.copy(path, place / ("lib" if ".so" in path.name else "bin") / path.name)
    for folder in ("modules", "etc", "root/.ssh"):
        (place / folder).mkdir(parents=True)
    for number, name in enumerate(MODULES):
        if data := module_of(guest.kernel, name):
            (place / "modules" / f"{number}_{name}.ko").write_bytes(data)
    (place / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (place / "etc" / "shells").write_text("/bin/sh\n")
    (place / "root" / ".ssh" / "authorized_keys").write_text(key.with_suffix(".pub").read_text())
    (place / "init").write_text(FIRST)
    (place / "init").chmod(0o755)


def started(guest: Guest, work: Path, port: int) -> subprocess.Popen[bytes]:
    """The guest, whose port for ssh is one of ours."""
    pack(work / "guest", work / "initrd")
    network = f"user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{port}-:22"
    with (work / "console").open("wb") as file:
        words = qemu(guest, work / "initrd", memory_mib=MEMORY_MIB, network=network)
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def record(target: str, output: Path) -> subprocess.CompletedProcess[str]:
    """Our runtime's sites, called in a child, recorded from here."""
    words = ["run", "--no-views", "--levels", "token,graph,operator,expert", "--on", target, "-o", str(output)]
    words += ["--libraries", "/lib", "--", "/bin/busybox", "sh", "-c", f"/bin/usdt_calls {CALLS}; true"]
    return subprocess.run([sys.executable, "-m", "tracer", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def try_guest(guest: Guest) -> bool:
    """Whether all calls came, and nothing stayed there."""
    if not guest.kernel.exists():
        guest.kernel.parent.mkdir(parents=True, exist_ok=True)
        make_kernel(guest)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        work, port = Path(folder), free.getsockname()[1]
        free.close()
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", work / "key")
        lay_out(guest, work / "guest", work / "key")
        known = "-F none -o StrictHostKeyChecking=no -o LogLevel=ERROR -o UserKnownHostsFile=/dev/null"
        target = f"ssh:{known} -i {work}/key -p {port} root@127.0.0.1"
        process = started(guest, work, port)
        try:
            done = record(target, work / "run")
            while "cannot be reached" in done.stderr and time.monotonic() - began < READY_S:
                time.sleep(5)
                done = record(target, work / "run")
            left = run(*target.removeprefix("ssh:").join(["ssh ", " ls /var/tmp"]).split()).stdout.split()
        finally:
            process.terminate()
            process.wait()
        if done.returncode:
            print(done.stderr[-3000:], (work / "console").read_text(errors="replace")[-2000:])
            return False
        kept = RawRecording(work / "run")
        found, lost, machine = len(kept.records("op_end")), kept.manifest["lost"], kept.manifest["machine"]
        print(f"{guest.name}: {found} of {CALLS} op_end, lost {json.dumps(lost)}, left there: {left or 'nothing'}", end="; ")
        print(f"{machine['kernel']} {machine['arch']}, {time.monotonic() - began:.0f} s", flush=True)
        return found == CALLS and not lost and not left and kept.is_whole


def main() -> int:
    """Try the guests that were chosen; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(MACHINES), help="only guests of this architecture")
    parser.add_argument("--kernel", metavar="SERIES", help="only guests with a kernel of this series: 6.1")
    args = parser.parse_args()
    good = []
    for guest in GUESTS:
        if args.arch in (None, guest.arch) and args.kernel in (None, guest.series):
            try:
                good.append(try_guest(guest))
            except Unobtainable as error:
                print(f"== the guest {guest.name} was NOT run: {error}")
    return int(not good or not all(good))


if __name__ == "__main__":
    sys.exit(main())
