"""The recorder's readers of ring and perf buffers (tracer/recorder) over files that pose as the kernel's."""

import ctypes
import platform
import tempfile
from ctypes import POINTER, byref, c_bool, c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from workloads import ROOT
from workloads.compiling import compile_c

DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}


@cache
def load_library() -> ctypes.CDLL:
    """The readers, compiled once; needs the headers that `make recorders` fetches."""
    folder, headers = ROOT / "tracer" / "recorder", ROOT / "build" / "static" / DEBIAN[platform.machine()] / "usr" / "include"
    with tempfile.TemporaryDirectory() as place:
        flags = ("-std=gnu11", "-D_GNU_SOURCE", "-shared", "-fPIC", f"-I{folder}", f"-I{ROOT / 'bpf'}", f"-isystem{headers}")
        sources = [str(folder / "ring.c"), str(folder / "perf.c")]
        answer = ctypes.CDLL(str(compile_c(Path(place) / "buffers.so", "buffers.c", *sources, flags=flags)))
    answer.open_buffer.restype, answer.open_buffer.argtypes = c_void_p, [c_int, c_bool, c_size_t, c_uint64]
    answer.take_from_buffer.restype, answer.take_from_buffer.argtypes = c_void_p, [c_void_p, POINTER(c_uint64)]
    answer.release_to_buffer.restype, answer.release_to_buffer.argtypes = None, [c_void_p, c_uint64]
    answer.lost_of_buffer.restype, answer.lost_of_buffer.argtypes = c_uint64, [c_void_p]
    return answer


class Buffer:
    """A buffer in a file: a ring, or one CPU's perf buffer of a page."""

    def __init__(self, fd: int, slot_bytes: int, size: int, perf: bool = False):
        self.slot, self._at = slot_bytes, load_library().open_buffer(fd, perf, slot_bytes, size)

    def take(self) -> np.ndarray:
        """The finished records, shape [n, slot], which are released."""
        size = c_uint64()
        at = load_library().take_from_buffer(self._at, byref(size))
        slots = np.frombuffer(ctypes.string_at(at, size.value) if size.value else b"", np.uint8).reshape(-1, self.slot)
        load_library().release_to_buffer(self._at, size.value)
        return slots

    @property
    def lost(self) -> int:
        """Records that the buffer itself reports as lost."""
        return int(load_library().lost_of_buffer(self._at))
