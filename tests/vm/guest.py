"""Guests for the tracer's tests: other kernels and the other architecture, by QEMU without acceleration.

    python -m tests.vm.guest [--arch ARCH] [--kernel SERIES] [--quick] [--rungs a,b] [--json FILE] [--prepare]

Packages come by name from the suites of the machine's own Debian mirror through a private apt; nothing of the machine changes.
What is made once (a kernel 100 MB; for each architecture a small root of 0.3 GB, and a large one of 1.6 GB where a rung needs it)
is kept in build/vm, or in $MOESCOPE_VM.
"""

import argparse
import contextlib
import hashlib
import json
import lzma
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracer.recording.paths import RECORDERS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("MOESCOPE_VM", ROOT / "build" / "vm"))
CONFIG: dict[str, Any] = tomllib.loads((HERE / "guests.toml").read_text())
RECIPE = hashlib.sha256(json.dumps([CONFIG["root_suites"], CONFIG["roots"]]).encode()).hexdigest()[:8]
"""Of the roots: other packages, another root."""
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
LIMIT_S, QUICK_LIMIT_S, MEMORY_MIB, CPUS = 3600, 420, 4096, 2
RESULT = re.compile(r"^RUNG (\{.*\})", re.M)
MODULES = (
    *("virtio", "virtio_ring", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "virtio_mmio", "virtio_blk"),
    *("crc16", "mbcache", "jbd2", "crc32c_generic", "crc32c-cryptoapi", "ext4", "virtio_rng"),
)
MACHINES = {
    "amd64": ("qemu-system-x86_64", "ttyS0", ["-M", "q35", "-cpu", "max"], "x86_64"),
    "arm64": ("qemu-system-aarch64", "ttyAMA0", ["-M", "virt", "-cpu", "max,pauth-impdef=on"], "aarch64"),
}
NATIVE = "arm64" if os.uname().machine == "aarch64" else "amd64"
APT_CONF = """APT::Architecture "{arch}";
APT::Architectures {{ "{arch}"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
Dir::State "{place}/state";
Dir::State::Lists "{place}/lists";
Dir::State::status "{place}/state/status";
Dir::Cache "{place}/cache";
Dir::Etc::sourcelist "{place}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
"""


@dataclass(frozen=True)
class Guest:
    """One guest of guests.toml."""

    arch: str
    series: str
    rungs: tuple[str, ...]
    quick: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As the command line takes it."""
        return f"{self.arch}-{self.series}"

    @property
    def kernel(self) -> Path:
        """Where its unpacked kernel lies."""
        return CACHE / self.arch / f"kernel-{self.series}"

    def root(self, size: str) -> Path:
        """The folder of its root, which all guests of the architecture share; the image lies beside it."""
        return CACHE / self.arch / f"root-{size}-{RECIPE}"

    def image(self, size: str) -> Path:
        """The root as a disk."""
        return self.root(size).with_suffix(".ext4")


GUESTS = [
    Guest(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}) for row in CONFIG["guest"]
]


def size_for(rungs: tuple[str, ...]) -> str:
    """The smallest root that holds what the rungs need."""
    return "large" if set(rungs) & set(CONFIG["large"]) else "small"


class Unobtainable(Exception):
    """What a guest is made of cannot be had here; the message says what."""


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that must succeed; its output is shown where it does not."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done


def mirrors() -> dict[bool, str]:
    """The addresses of the machine's own Debian mirror: of the suites (False), and of their security updates (True)."""
    uris = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages").stdout.split()
    ends = {False: "/debian", True: "/debian-security"}
    return {secure: next((uri for uri in uris if uri.rstrip("/").endswith(end)), "") for secure, end in ends.items()}


def apt_of(arch: str, name: str, suites: list[str]) -> Path:
    """The configuration of a private apt for an architecture and some suites, its lists fetched."""
    place = CACHE / arch / name
    conf = place / "apt.conf"
    if conf.exists():
        return conf
    for folder in ("lists/partial", "cache/archives/partial", "state"):
        (place / folder).mkdir(parents=True, exist_ok=True)
    (place / "state" / "status").touch()
    known = mirrors()
    lines = [
        f"deb [arch={arch} signed-by={KEYRING} check-valid-until=no] {known[suite.endswith('-security')]} {suite} main"
        for suite in suites
    ]
    (place / "sources.list").write_text("\n".join(lines) + "\n")
    draft = place / "draft.conf"
    draft.write_text(APT_CONF.format(arch=arch, place=place.resolve()))
    run("apt-get", "-c", draft, "update", "-qq")
    draft.rename(conf)
    return conf


def unpack(packages: list[Path], place: Path) -> None:
    """Lay Debian packages out in a folder, without running anything of theirs."""
    place.mkdir(parents=True, exist_ok=True)
    for package in packages:
        run("dpkg-deb", "-x", package, place)


def version_key(name: str) -> list[int]:
    """Sorts package names by the numbers in them."""
    return [int(number) for number in re.findall(r"\d+", name)]


def make_kernel(guest: Guest) -> None:
    """Fetch the newest cloud kernel of the series; a mirror may list what it no longer serves, then the next one is taken."""
    conf = apt_of(guest.arch, "apt-kernels", CONFIG["suites"])
    wanted = rf"^linux-image-{re.escape(guest.series)}\.[0-9][.0-9+~a-z-]*-cloud-{guest.arch}$"
    listed = run("apt-cache", "-c", conf, "search", "--names-only", wanted).stdout
    for name in sorted((line.split()[0] for line in listed.splitlines() if "-rt-" not in line), key=version_key, reverse=True):
        version = name.removeprefix("linux-image-")
        needs = run("apt-cache", "-c", conf, "depends", name).stdout
        # from 7 on the image is apart from its modules
        parts = re.findall(rf"Depends: (linux-(?:binary|modules|base)-{re.escape(version)})$", needs, re.M)
        with tempfile.TemporaryDirectory() as folder:
            words = ["apt-get", "-c", str(conf), "download", "-qq", name, *parts]
            if subprocess.run(words, cwd=folder, capture_output=True, check=False).returncode == 0:
                unpack(sorted(Path(folder).glob("*.deb")), guest.kernel)
                return
    raise SystemExit(f"no kernel {guest.series} for {guest.arch} in {', '.join(CONFIG['suites'])}")


def make_root(guest: Guest, size: str) -> None:
    """A root without running anything of its architecture: packages are unpacked, wheels laid out."""
    conf, root = apt_of(guest.arch, "apt-root", CONFIG["root_suites"]), guest.root(size)
    parts = [CONFIG["roots"][name] for name in (("small",) if size == "small" else ("small", "large"))]
    archives = root.with_name(f"archives-{size}").resolve()
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    words = ["apt-get", "-c", conf, "-o", f"Dir::Cache::archives={archives}", "install", "-y", "-qq", "--download-only"]
    run(*words, *(name for part in parts for name in part["packages"]))
    unpack(sorted(archives.glob("*.deb")), root)
    furnish(root)
    packages = root / "usr" / "local" / "lib" / "python3.11" / "dist-packages"
    lay_wheels(guest.arch, packages, [name for part in parts for name in part["wheels"]])
    compile_python(root / "usr")
    run("mke2fs", "-q", "-t", "ext4", "-d", root, "-E", "root_owner=0:0", f"{guest.image(size)}.new", "5G")
    Path(f"{guest.image(size)}.new").rename(guest.image(size))


def furnish(root: Path) -> None:
    """What the packages' own scripts would do, as far as a guest needs it."""
    for folder in ("proc", "sys", "dev", "tmp", "run", "out", "tree", "root"):
        (root / folder).mkdir(exist_ok=True)
    base = root / "usr" / "share" / "base-passwd"
    shutil.copy(base / "passwd.master", root / "etc" / "passwd")
    shutil.copy(base / "group.master", root / "etc" / "group")
    for name, target in {"bin/sh": "dash", "usr/bin/cc": "gcc"}.items():
        with contextlib.suppress(FileExistsError):
            (root / name).symlink_to(target)
    for folder in ("doc", "man", "locale", "info"):
        shutil.rmtree(root / "usr" / "share" / folder, ignore_errors=True)
    (root / "tree.init").write_text((HERE / "init.sh").read_text())


def compile_python(place: Path) -> None:
    """Python's modules to bytecode, which any architecture reads: an emulated guest would take minutes to."""
    if sys.version_info[:2] == (3, 11):
        words = ["-m", "compileall", "-q", "-q", "--invalidation-mode", "unchecked-hash", str(place)]
        subprocess.run([sys.executable, *words], capture_output=True, check=False)  # some of Python's own tests cannot be


def lay_wheels(arch: str, place: Path, wheels: list[str]) -> None:
    """Install wheels of an architecture into a folder."""
    machine = MACHINES[arch][3]
    tags = [f"manylinux_2_{minor}_{machine}" for minor in (36, 35, 34, 31, 28, 27, 26, 24, 17)]
    tags += [f"manylinux2014_{machine}", f"linux_{machine}"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    options = ["--no-compile", "--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.11", "--upgrade"]
    run(sys.executable, "-m", "pip", "install", "-q", *options, *platforms, "--target", place, *wheels)


def prepare(guest: Guest, size: str) -> None:
    """Make what the guest lacks; raises Unobtainable where nothing can be downloaded, or QEMU is not there."""
    if shutil.which(MACHINES[guest.arch][0]) is None:
        raise Unobtainable(f"{MACHINES[guest.arch][0]} is not installed")
    if not (guest.kernel.exists() and guest.image(size).exists()):
        if not shutil.which("apt-get") or not mirrors()[False]:
            raise Unobtainable("kernels and roots come from a Debian mirror by apt, and there is none")
        print(f"== making the guest {guest.name} in {CACHE}: a kernel, packages and wheels are downloaded", flush=True)
    guest.kernel.parent.mkdir(parents=True, exist_ok=True)
    if not guest.kernel.exists():
        make_kernel(guest)
    if not guest.image(size).exists():
        make_root(guest, size)


def copy_tree(guest: Guest, place: Path) -> None:
    """The working tree as git sees it, built for the guest."""
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    build(guest, place)
    compile_python(place)


def build(guest: Guest, place: Path) -> None:
    """Compile what is compiled, for the guest's architecture; for this machine's it is `make build`'s, brought up to date."""
    machine = MACHINES[guest.arch][3]
    made = ROOT / "build" / "cmake"
    if guest.arch != NATIVE or not (made / "build.ninja").exists():
        made = ROOT / "build" / f"cmake-{guest.arch}"
    if not (made / "build.ninja").exists():
        options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DPython_INCLUDE_DIR={sysconfig.get_paths()['include']}"]
        options += [f"-DRECORDER_LIBRARIES={ROOT}/build/static", "-DRECORDERS=OFF"]
        if guest.arch != NATIVE:
            options.append(f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/cmake/{machine}-linux-gnu.cmake")
        run("cmake", "-S", ROOT, "-B", made, "-G", "Ninja", *options)
    run("cmake", "--build", made)
    run("cmake", "--install", made, "--prefix", place)
    if RECORDERS.exists():
        shutil.copytree(RECORDERS, place / RECORDERS.relative_to(ROOT), dirs_exist_ok=True)
    folder = place / "build"
    folder.mkdir(exist_ok=True)
    compiler, programs = "cc" if guest.arch == NATIVE else f"{machine}-linux-gnu-gcc", place / "workloads" / "programs"
    sites = place / "runtime" / "telemetry"
    options = ["-O2", "-pthread", "-rdynamic", f"-L{sites}", "-l:_probes.so", "-Wl,--allow-shlib-undefined,-z,lazy"]
    run(compiler, programs / "usdt_calls.c", "-o", folder / "usdt_calls", *options, "-Wl,-rpath,/tree/runtime/telemetry")
    run(compiler, "-O2", programs / "reload.c", "-o", folder / "reload")
    run(compiler, "-O2", "-shared", "-fPIC", "-fno-ipa-ra", programs / "named.c", "-o", folder / "libnamed.so")
    if guest.arch == "arm64":
        signing = ["-O1", "-fno-ipa-ra", "-fno-shrink-wrap", "-mbranch-protection=standard"]
        run(compiler, *signing, programs / "named.c", "-o", folder / "named_signed")
        words = [compiler, "-shared", "-fPIC", "-nostartfiles", "-Wl,-Bsymbolic", HERE / "arm64_sites.c"]
        run(*words, "-o", folder / "arm64_sites.so")


def module_of(kernel: Path, name: str) -> bytes | None:
    """A kernel module, unpacked."""
    for path in kernel.glob(f"**/kernel/**/{name}.ko*"):
        if path.suffix == ".zst":
            return subprocess.run(["zstd", "-qdc", path], capture_output=True, check=True).stdout
        return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return None


def make_initrd(guest: Guest, rungs: tuple[str, ...], work: Path) -> Path:
    """The archive that the guest begins in."""
    place = work / "initrd.d"
    for folder in ("bin", "lib", "new", "proc", "sys", "dev"):
        (place / folder).mkdir(parents=True)
    root = guest.root(size_for(rungs))
    shutil.copy(next(path for path in (root / "bin/busybox", root / "usr/bin/busybox") if path.exists()), place / "bin/busybox")
    for number, name in enumerate(MODULES):
        data = module_of(guest.kernel, name)
        if data is not None:
            (place / "lib" / f"{number:02d}_{name}.ko").write_bytes(data)
    (place / "rungs").write_text(" ".join(rungs))
    shutil.copy(HERE / "initrd.sh", place / "init")
    (place / "init").chmod(0o755)
    pack(place, work / "initrd")
    return work / "initrd"


def pack(place: Path, archive: Path) -> None:
    """A folder as the archive that a kernel unpacks into its initial ramdisk."""
    names = run("find", ".", cwd=place).stdout
    with archive.open("wb") as file:
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=place, input=names.encode(), stdout=file, check=True)


def qemu(
    guest: Guest, initrd: Path, *more: str, memory_mib: int = MEMORY_MIB, network: str = "none", limit_s: int = LIMIT_S
) -> list[str]:
    """The command that boots a guest's kernel with a ramdisk; `more` are further words, and the last of a kind counts."""
    program, console, machine, _ = MACHINES[guest.arch]
    words = ["nice", "-n", "10", "timeout", str(limit_s), program, *machine, "-accel", "tcg,thread=multi"]
    words += ["-smp", str(CPUS), "-m", str(memory_mib), "-nographic", "-nic", network, "-no-reboot"]
    words += ["-kernel", str(next(guest.kernel.glob("**/vmlinuz*"))), "-initrd", str(initrd)]
    return [*words, "-append", f"console={console} quiet panic=-1 softlockup_panic=1", *more]


def boot(guest: Guest, rungs: tuple[str, ...], out: Path, echo: bool = True, limit_s: int = LIMIT_S) -> str:
    """Boot the guest with this tree; what it printed. Files that the rungs left come to `out`."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        copy_tree(guest, work / "tree")
        initrd = make_initrd(guest, rungs, work)
        run("mke2fs", "-q", "-t", "ext4", "-d", work / "tree", "-E", "root_owner=0:0", work / "tree.img", "2G")
        with open(work / "out.img", "wb") as file:
            file.truncate(1 << 30)
        images = ((guest.image(size_for(rungs)), ",snapshot=on"), (work / "out.img", ""), (work / "tree.img", ""))
        drives = [f"file={image},format=raw,if=virtio,cache=unsafe{more}" for image, more in images]
        words = qemu(guest, initrd, *(word for drive in drives for word in ("-drive", drive)), limit_s=limit_s)
        printed = []
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace") as process:
            assert process.stdout
            for line in process.stdout:
                printed.append(line)
                if echo:
                    print(line, end="", flush=True)
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-xf", work / "out.img", "-C", out], capture_output=True, check=False)
    return "".join(printed)


def results(printed: str) -> list[dict[str, Any]]:
    """What the rungs said: a row for each."""
    return [json.loads(row) for row in RESULT.findall(printed)]


def climb(guest: Guest, rungs: tuple[str, ...], echo: bool = True, limit_s: int = LIMIT_S) -> list[dict[str, Any]]:
    """Boot a guest and climb its rungs; a rung that never ended is a row too.

    Rungs that a guest did not come to are tried in a second boot: emulated ones stand still where the kernel patches itself.
    """
    began, cpu_before, out = time.monotonic(), children_cpu_s(), CACHE / "out" / guest.name
    printed = boot(guest, rungs, out, echo, limit_s)
    left = tuple(rung for rung in rungs if rung not in {row["rung"] for row in results(printed)})
    if left:
        print(f"== {guest.name} ended before {', '.join(left)}, and is booted a second time", "" if echo else printed, flush=True)
        printed += boot(guest, left, out, echo, limit_s)
    rows = results(printed)
    if not echo and not (len(rows) == len(rungs) and all(row["ok"] for row in rows)):
        print(printed)
    ended = {row["rung"] for row in rows}
    rows += [{"rung": rung, "ok": False, "seen": "the guest ended before"} for rung in rungs if rung not in ended]
    took = {"guest_s": round(time.monotonic() - began), "guest_cpu_s": round(children_cpu_s() - cpu_before)}
    return [{"guest": guest.name, **took, **row} for row in rows]


def children_cpu_s() -> float:
    """CPU time of all commands that have ended: what a guest takes, however busy the machine."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Climb with the guests that were chosen; 1 where a rung failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(MACHINES), help="only guests of this architecture")
    parser.add_argument("--kernel", metavar="SERIES", help="only guests with a kernel of this series: 6.1")
    parser.add_argument("--quick", action="store_true", help="only the quick rungs, of the guests that have some")
    parser.add_argument("--rungs", default="", help="only these, separated by commas")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--prepare", action="store_true", help="only make what they boot from")
    args = parser.parse_args()
    chosen = [each for each in GUESTS if args.arch in (None, each.arch) and args.kernel in (None, each.series)]
    rows: list[dict[str, Any]] = []
    for guest in chosen:
        rungs = tuple(args.rungs.split(",")) if args.rungs else guest.quick if args.quick else guest.rungs
        if not rungs:
            continue
        try:
            prepare(guest, size_for(rungs))
        except Unobtainable as error:
            print(f"== the guest {guest.name} was NOT run: {error}")
            continue
        if args.prepare:
            continue
        print(f"== booting {guest.name}: {', '.join(rungs)}", flush=True)
        rows += climb(guest, rungs, echo=not args.quick, limit_s=QUICK_LIMIT_S if args.quick else LIMIT_S)
    print_results(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(not all(row["ok"] for row in rows) or not (rows or args.quick or args.prepare))


def print_results(rows: list[dict[str, Any]]) -> None:
    """A line for each rung: guest, its seconds and CPU seconds in all, rung, result."""
    for row in rows:
        time_s = f"{row['guest_s']:5} s {row['guest_cpu_s']:5} CPU s"
        print(f"{row['guest']:12} {time_s}  {row['rung']:10} {'passed' if row['ok'] else 'FAILED'}  {row['seen']}")


if __name__ == "__main__":
    sys.exit(main())
