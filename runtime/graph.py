"""A graph that a backend can run: one ONNX Runtime session and what the probes say of it."""

from itertools import count
from typing import Protocol

import numpy as np
import onnxruntime as ort

from runtime import probes
from runtime.errors import BackendError
from runtime.log import RunLog
from runtime.probes import Kind

CPU = 1
HTP = 2
_handles = count(1)


class Backend(Protocol):
    """Makes sessions of subgraphs."""

    id: int
    label: str
    tiers: tuple[int, ...]

    def session(self, name: str, dims: dict[str, int]) -> ort.InferenceSession:
        """The session of the package's subgraph `name`, with its dynamic dimensions T, P, S fixed to `dims`."""


class Graph:
    """One session; `tier` is the rows of its static shape, 0 where dynamic."""

    def __init__(self, session: ort.InferenceSession, log: RunLog, kind: Kind, layer: int, expert: int, backend: int, tier: int):
        self.handle = next(_handles)
        self.session = session
        self.log = log
        self.kind, self.layer, self.expert, self.backend, self.tier = kind, layer, expert, backend, tier

    def run(self, feeds: dict[str, np.ndarray], n_tokens: int) -> list[np.ndarray]:
        """Run the session once over n_tokens useful rows."""
        probes.graph_begin(self.handle, self.kind, self.layer, self.expert, self.backend, self.tier << 32 | n_tokens)
        status = -1
        try:
            outputs: list[np.ndarray] = self.session.run(None, feeds)
            status = 0
        except Exception as error:
            where = self.kind.name.lower() + (f" {self.layer}" if self.layer >= 0 else "")
            raise BackendError(
                f"ONNX Runtime failed in {where} ({str(error).splitlines()[0]}): convert the model again"
            ) from None
        finally:
            probes.graph_end(self.handle, status)
        self.log.graph(self.kind, self.backend)
        return outputs
