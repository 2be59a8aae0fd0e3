"""The NPU backend: Qualcomm HTP through ONNX Runtime's QNN execution provider, or Qualcomm's emulator of it on x86-64.

Sessions have static shapes. Each is compiled once; its context binary lies in the package's folder `htp/`, keyed by everything
it was made from, and is written into a temporary folder first so that a partial one is never loaded.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any

import onnxruntime as ort

from runtime.cpu import forget_model_bytes, session_options
from runtime.errors import BackendError
from runtime.graph import HTP
from runtime.package import Package, user_cache
from runtime.profile import Timers
from runtime.qnn_profiling import OFF, Profiling, SwitchingSession

PROVIDER = "QNNExecutionProvider"
# What the emulator shall be; without it fp32 graphs run in fp32. A real device knows what it is.
SOC_MODEL = "57"
# It folds a residual into a Gemm, whose bias QNN then wants to be a constant.
UNWANTED = ["MatMulAddFusion"]
EMULATED = platform.machine() == "x86_64"
LABEL = "HTP emulator" if EMULATED else "HTP"
_devices: list[Any] = []


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Qualcomm's libraries greet on standard output when first used: keep that out of the generated text."""
    sys.stdout.flush()
    flush = ctypes.CDLL(None).fflush
    kept = os.dup(1)
    with open(os.devnull, "wb") as sink:
        os.dup2(sink.fileno(), 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)


def available() -> str:
    """Empty where the HTP backend can be used, else why it cannot."""
    try:
        import onnxruntime_qnn  # noqa: F401
    except ImportError:
        return "the QNN execution provider is not installed: pip install moescope[npu]"
    return "" if _find_devices() else "ONNX Runtime finds no QNN device: check the onnxruntime-qnn installation"


def _find_devices() -> list[Any]:
    """Register the provider once for the whole process (unregistering crashes at exit) and list its devices."""
    if not _devices:
        import onnxruntime_qnn

        ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
        _devices.extend(device for device in ort.get_ep_devices() if device.ep_name == PROVIDER)
    return _devices


def versions() -> dict[str, str]:
    """What context binaries depend on besides their graph: they are loaded only by what made them."""
    import onnxruntime_qnn

    return {"onnxruntime": ort.__version__, "onnxruntime-qnn": onnxruntime_qnn.__version__, "backend": LABEL}


class HtpBackend:
    """Static shapes in fp16; `profiling` writes one CSV for each profiled session into `profile_folder`."""

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
        reason = available()
        if reason:
            raise BackendError(reason)
        if not package.portable:
            raise BackendError(
                f"{package.folder} was converted for the CPU alone: convert with --backend qnn and --bits 16 or 32"
            )
        self.package, self.tiers, self.profiling = package, tiers, profiling or Profiling()
        self.profile_folder, self.timers = profile_folder or Path("qnn-profile"), timers
        self.cache = self._writable_cache()
        self.soc, self.performance = soc or SOC_MODEL, performance
        self._sessions = 0
        made_by = package.manifest.get("compiled", {}).get("versions", versions())
        if made_by != versions():
            told = ", ".join(f"{name} {value} (here {versions()[name]})" for name, value in made_by.items())
            print(f"moescope: context binaries were made by {told}: compiled again as they are needed", file=sys.stderr)

    @property
    def expert_bytes(self) -> int:
        """In fp16."""
        return 2 * self.package.family.expert_parameters

    def session(self, name: str, dims: dict[str, int]) -> ort.InferenceSession:
        """The subgraph's session, which follows `profiling` as that changes."""
        return SwitchingSession(name.split("_")[0], self.profiling, partial(self._session, name, dims), self.timers)

    def _session(self, name: str, dims: dict[str, int], level: str) -> tuple[ort.InferenceSession, str]:
        """A session at one level of profiling, from its context binary or compiled and kept as one, and its CSV file's name."""
        label = "_".join([name, *(f"{key}{value}" for key, value in sorted(dims.items()))])
        parts = (self.package.digest(name), label, self.soc, *versions().values(), level)
        kept = self.cache / f"{label}_{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}"
        self._sessions += 1
        csv = f"{label}_{self._sessions:04d}.csv" if level != OFF else ""
        if kept.is_dir():
            with suppress(BackendError), self._staged("context load"):
                return self._open(str(kept / "graph.onnx"), label, self._options(csv, level)), csv
            shutil.rmtree(kept, ignore_errors=True)
        with self._staged("compile"):
            return self._compiled(name, label, dims, kept, self._options(csv, level)), csv

    def _compiled(
        self, name: str, label: str, dims: dict[str, int], kept: Path, options: ort.SessionOptions
    ) -> ort.InferenceSession:
        """Compile into a folder of its own, which is renamed once it is whole."""
        try:
            partial = Path(tempfile.mkdtemp(prefix=".compiling.", dir=self.cache))
        except OSError as error:
            raise BackendError(
                f"{self.cache} cannot be written ({error.strerror}): free space or choose another --package"
            ) from None
        try:
            for dimension, value in dims.items():
                options.add_free_dimension_override_by_name(dimension, value)
            options.add_session_config_entry("ep.context_enable", "1")
            options.add_session_config_entry("ep.context_file_path", str(partial / "graph.onnx"))
            options.add_session_config_entry("ep.context_embed_mode", "0")
            session = self._open(self.package.whole_graph(name), label, options)
            partial.chmod(0o755)
            with suppress(OSError):
                partial.rename(kept)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return session

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
            self.profile_folder.mkdir(parents=True, exist_ok=True)
            qnn |= {"profiling_level": level, "profiling_file_path": str(self.profile_folder / csv)}
        options.add_provider_for_devices(_find_devices()[:1], qnn)
        return options

    def _open(self, model: str | bytes, label: str, options: ort.SessionOptions) -> ort.InferenceSession:
        try:
            session = self._create(model, options)
        except Exception as error:
            told = str(error).splitlines()[0]
            raise BackendError(f"{LABEL} refuses {label} ({told}): use --prefill-backend cpu and --decode-backend cpu") from None
        forget_model_bytes(session)
        session.disable_fallback()
        return session

    def _create(self, model: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
        with nullcontext() if HtpBackend._greeted else _quiet_stdout():
            HtpBackend._greeted = True
            return ort.InferenceSession(model, options, enable_fallback=0, disabled_optimizers=UNWANTED)

    def _writable_cache(self) -> Path:
        """`htp/` in the package; a folder in the user's cache where the package is read-only."""
        for folder in (self.package.folder / "htp", user_cache() / "htp" / self.package.manifest["fingerprint"][:16]):
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                if os.access(folder, os.W_OK):
                    return folder
        raise BackendError(
            f"neither {self.package.folder} nor {user_cache()} can be written: give a writable place with --package"
        )
