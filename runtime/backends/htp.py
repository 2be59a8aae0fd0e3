"""The NPU backend: Qualcomm HTP through ONNX Runtime's QNN execution provider, or Qualcomm's emulator of it on x86-64.

Sessions have static shapes. Each is compiled once; its context binary is kept in the package's folder `htp/`, keyed by
everything that it depends on, and is first written into a temporary folder so that a partial one is never loaded.
"""

import ctypes
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from errno import ENOSPC
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any
from weakref import WeakValueDictionary

import onnxruntime as ort

from moescope.answers import note_emulator
from runtime.backends.cpu import forget_model_bytes, session_options
from runtime.backends.qnn_profiling import OFF, Profiling, SwitchingSession
from runtime.cache_rules.forms import HTP
from runtime.errors import BackendError, RequestError
from runtime.package.layout import Package, sha256, user_cache
from runtime.package.npu_graphs import for_npu
from runtime.telemetry.profile import Timers

PROVIDER = "QNNExecutionProvider"
# SoC that the emulator reports; without it fp32 graphs run in fp32. A real device knows its own.
SOC_MODEL = "57"
# It fuses a residual into a Gemm, whose bias QNN requires to be a constant.
UNWANTED = ["MatMulAddFusion"]
SEPARATE, SHARED = "separate", "shared"
"""Layouts of an expert's context binaries: one per tier, or one for all tiers, whose graphs share the weights."""
# With less than this left on the disk, a failed compilation is attributed to the full disk.
LEAST_FREE = 1 << 20
EMULATED = platform.machine() == "x86_64"
LABEL = "HTP emulator" if EMULATED else "HTP"
_devices: list[Any] = []


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Keep the greeting that Qualcomm's libraries print on standard output at first use out of the generated text."""
    sys.stdout.flush()
    flush = ctypes.CDLL(None).fflush
    stdout = os.dup(1)
    with open(os.devnull, "wb") as sink:
        os.dup2(sink.fileno(), 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def why_unavailable() -> str:
    """Empty if the HTP backend can be used, otherwise the reason why not."""
    try:
        import onnxruntime_qnn  # noqa: F401
    except ImportError:
        return "the QNN execution provider is not installed: pip install 'moescope[npu]'"
    return "" if _find_devices() else "ONNX Runtime finds no QNN device: check the onnxruntime-qnn installation"


def _find_devices() -> list[Any]:
    """Register the provider once for the whole process (unregistering crashes at exit) and list its devices."""
    if not _devices:
        import onnxruntime_qnn

        ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
        _devices.extend(device for device in ort.get_ep_devices() if device.ep_name == PROVIDER)
    return _devices


def binary_versions() -> dict[str, str]:
    """The versions that context binaries depend on besides their graph: only the same versions load them."""
    import onnxruntime_qnn

    return {"onnxruntime": ort.__version__, "onnxruntime-qnn": onnxruntime_qnn.__version__, "backend": LABEL}


class SharedTiers:
    """The sessions of one expert in one binary, by tier. They are freed together, with the last user of any."""

    def __init__(self, sessions: dict[int, ort.InferenceSession]):
        self.sessions = sessions


class SharedTier:
    """One tier of SharedTiers."""

    def __init__(self, group: SharedTiers, tier: int):
        self._group = group
        self.run = group.sessions[tier].run


class HtpBackend:
    """Static shapes in fp16; `profiling` writes one CSV per profiled session into `profile_folder`."""

    id = HTP
    label = LABEL
    _greeted = False

    def __init__(
        self,
        package: Package,
        tiers: tuple[int, ...],
        profiling: Profiling | None = None,
        profile_folder: Path | None = None,
        soc: str = "",
        timers: Timers | None = None,
        performance: str = "default",
    ):
        reason = why_unavailable()
        if reason:
            raise BackendError(reason)
        note_emulator(EMULATED)
        if not package.portable:
            raise BackendError(f"{package.folder} was converted for the CPU only: convert with --backend qnn")
        self.package, self.tiers, self.profiling = package, tiers, profiling or Profiling()
        self.profile_folder, self.timers = profile_folder or Path("qnn-profile"), timers
        self.cache = self._writable_cache()
        self.soc, self.performance = soc or SOC_MODEL, performance
        self._sessions = 0
        self._sharing_refused = False
        compiled = package.manifest.get("compiled", {})
        self.layout, made_by = compiled.get("layout", SEPARATE), compiled.get("versions", binary_versions())
        self._groups: WeakValueDictionary[str, SharedTiers] = WeakValueDictionary()
        if made_by != binary_versions():
            makers = ", ".join(f"{name} {value} (here {binary_versions()[name]})" for name, value in made_by.items())
            print(f"moescope: context binaries were made by {makers}: recompiled on demand", file=sys.stderr)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: as stored if weights are quantized, else in fp16."""
        quantized = self.package.manifest["precisions"]["experts"]["bits"] < 16
        return self.package.expert_bytes if quantized else 2 * self.package.family.expert_parameters

    def session(self, name: str, dims: dict[str, int]) -> ort.InferenceSession:
        """The subgraph's session, which follows changes of `profiling`."""
        return SwitchingSession(name.split("_")[0], self.profiling, partial(self._session, name, dims), self.timers)

    def _session(self, name: str, dims: dict[str, int], level: str) -> tuple[ort.InferenceSession, str]:
        """(session at one profiling level, its CSV file's name); loads its context binary, or compiles and keeps one."""
        label = "_".join([name, *(f"{key}{value}" for key, value in sorted(dims.items()))])
        folder = self._folder(name, label, level)
        self._sessions += 1
        csv = f"{label}_{self._sessions:04d}.csv" if level != OFF else ""
        if self.layout == SHARED and level == OFF and set(dims) == {"T"}:
            with suppress(BackendError), self._staged("context load"):
                return self._of_group(name, dims["T"]), csv
        if folder.is_dir():
            with suppress(BackendError), self._staged("context load"):
                return self._open(str(folder / "graph.onnx"), label, self._options(csv, level)), csv
            shutil.rmtree(folder, ignore_errors=True)
        with self._staged("compile"):
            return self._compiled(name, label, dims, folder, self._options(csv, level)), csv

    def _compiled(
        self, name: str, label: str, dims: dict[str, int], folder: Path, options: ort.SessionOptions
    ) -> ort.InferenceSession:
        with self._written_whole(folder) as partial:
            _make_context(options, dims, partial / "graph.onnx")
            return self._open(for_npu(self.package.whole_graph(name)), label, options)

    def share(self, name: str, tiers: tuple[int, ...]) -> None:
        """Compile an expert in all tiers into one binary whose graphs share their weights, unless it exists."""
        folder = self._group_folder(name, tiers)
        if folder.is_dir():
            return
        with self._written_whole(folder) as partial:
            sessions = []
            for tier in tiers:
                options = self._options("", OFF)
                options.add_session_config_entry("ep.share_ep_contexts", "1")
                if tier == tiers[-1]:
                    options.add_session_config_entry("ep.stop_share_ep_contexts", "1")
                _make_context(options, {"T": tier}, partial / f"T{tier}.onnx")
                # QNN distinguishes the graphs of one context by a hash of their model's path.
                source = partial / f"source_T{tier}.onnx"
                source.write_bytes(for_npu(self.package.whole_graph(name)))
                sessions.append(self._open(str(source), f"{name} in {tier} rows", options))
                source.unlink()

    def _of_group(self, name: str, tier: int) -> "SharedTier":
        """A tier of a binary with several; all of them are opened together, since the first session owns the binary."""
        group = self._groups.get(name)
        if group is None:
            tiers = tuple(self.package.manifest["compiled"]["tiers"])
            folder = self._group_folder(name, tiers)
            if self._sharing_refused or tier not in tiers or not folder.is_dir():
                raise BackendError(f"{name} has no loadable binary with shared weights")
            try:
                group = SharedTiers({t: self._open_shared(folder / f"T{t}.onnx") for t in tiers})
            except BackendError:
                self._sharing_refused = True
                print(f"moescope: {LABEL} does not load binaries with shared weights: each tier gets its own", file=sys.stderr)
                raise
            self._groups[name] = group
        return SharedTier(group, tier)

    def _open_shared(self, path: Path) -> ort.InferenceSession:
        options = self._options("", OFF)
        options.add_session_config_entry("ep.share_ep_contexts", "1")
        return self._open(str(path), path.parent.name, options)

    def _group_folder(self, name: str, tiers: tuple[int, ...]) -> Path:
        return self._folder(name, f"{name}_T{'-'.join(map(str, tiers))}", SHARED)

    def _folder(self, name: str, label: str, variant: str) -> Path:
        """The folder of a subgraph's binary: its name has a digest of everything that the binary depends on."""
        parts = (self.package.digest(name), label, self.soc, *binary_versions().values(), variant)
        return self.cache / f"{label}_{sha256('|'.join(parts).encode())[:16]}"

    @contextmanager
    def _written_whole(self, folder: Path) -> Iterator[Path]:
        """A temporary folder to write into, renamed to `folder` at the end; removed if that fails."""
        try:
            partial = Path(tempfile.mkdtemp(prefix=".compiling.", dir=self.cache))
            try:
                yield partial
                partial.chmod(0o755)
                with suppress(OSError):
                    partial.rename(folder)
            except BackendError:
                if shutil.disk_usage(self.cache).free < LEAST_FREE:
                    raise OSError(ENOSPC, os.strerror(ENOSPC)) from None
                raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            problem = f"{self.cache} cannot be written ({error.strerror})"
            raise BackendError(f"{problem}: free space or choose another --package") from None

    @contextmanager
    def _staged(self, stage: str) -> Iterator[None]:
        began = monotonic_ns()
        yield
        if self.timers:
            self.timers.add(stage, began, monotonic_ns())

    def _options(self, csv: str, level: str) -> ort.SessionOptions:
        options = session_options()
        options.log_severity_level = 4
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        qnn = {"backend_type": "htp", "htp_performance_mode": self.performance}
        if EMULATED:
            qnn["soc_model"] = self.soc
        if level != OFF:
            try:
                self.profile_folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problem = f"{self.profile_folder} cannot be written ({error.strerror})"
                raise RequestError(f"{problem}: choose another folder with --profile or --qnn-profile-dir") from None
            qnn |= {"profiling_level": level, "profiling_file_path": str(self.profile_folder / csv)}
        options.add_provider_for_devices(_find_devices()[:1], qnn)
        return options

    def _open(self, model: str | bytes, label: str, options: ort.SessionOptions) -> ort.InferenceSession:
        try:
            with nullcontext() if HtpBackend._greeted else _quiet_stdout():
                HtpBackend._greeted = True
                session = ort.InferenceSession(model, options, enable_fallback=0, disabled_optimizers=UNWANTED)
        except Exception as error:
            cause = str(error).splitlines()[0]
            remedy = "use --prefill-backend cpu and --decode-backend cpu"
            if EMULATED and self.soc != SOC_MODEL:
                remedy = f"the emulated SoC is {self.soc}: choose another --soc or none"
            raise BackendError(f"{LABEL} refuses {label} ({cause}): {remedy}") from None
        forget_model_bytes(session)
        session.disable_fallback()
        return session

    def _writable_cache(self) -> Path:
        """`htp/` in the package, or a folder in the user's cache if the package is read-only."""
        for folder in (self.package.folder / "htp", user_cache() / "htp" / self.package.manifest["fingerprint"][:16]):
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                if os.access(folder, os.W_OK):
                    return folder
        raise BackendError(
            f"neither {self.package.folder} nor {user_cache()} can be written: give a writable folder with --package"
        )


def _make_context(options: ort.SessionOptions, dims: dict[str, int], path: Path) -> None:
    """Set options so that the session fixes these dimensions and writes its context binary next to `path`."""
    for dimension, value in dims.items():
        options.add_free_dimension_override_by_name(dimension, value)
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_file_path", str(path))
    options.add_session_config_entry("ep.context_embed_mode", "0")
