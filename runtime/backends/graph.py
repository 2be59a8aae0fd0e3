"""A graph that a backend can run: an ONNX Runtime session and what the probes report of it."""

from itertools import count
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from runtime.errors import BackendError
from runtime.telemetry import probes
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind

_handles = count(1)


def new_handle() -> int:
    """A number for a graph in the probes."""
    return next(_handles)


class Backend(Protocol):
    """Creates sessions of subgraphs."""

    id: int
    label: str
    tiers: tuple[int, ...]

    @property
    def expert_bytes(self) -> int:
        """Weight bytes of one expert in this backend's precision."""

    def session(self, name: str, dims: dict[str, int]) -> ort.InferenceSession:
        """The session of the package's subgraph `name`, with its dynamic dimensions T, P, S fixed to `dims`."""


class Graph:
    """A session; `tier`: the rows of its static shape, 0 if dynamic."""

    def __init__(self, session: ort.InferenceSession, log: RunLog, kind: Kind, layer: int, expert: int, backend: int, tier: int):
        self.handle = new_handle()
        self.session = session
        self.log = log
        self.kind, self.layer, self.expert, self.backend, self.tier = kind, layer, expert, backend, tier
        self._token: Binding | None = None
        # The item of runtime.backends.calls for one token, kept here by the code that prepares it.
        self.item: Any = None

    def run(self, feeds: dict[str, np.ndarray], n_tokens: int) -> list[np.ndarray]:
        """Run the session once over n_tokens useful rows."""
        outputs: list[np.ndarray] = self._probed(self.session.run, None, feeds, n_tokens)
        return outputs

    def run_bound(self, binding: "Binding", n_tokens: int) -> None:
        """Run over inputs and outputs that were bound before, which is the cheapest way."""
        self._probed(binding.run, binding.raw, None, n_tokens)

    def token_binding(self, name: str, value: ort.OrtValue) -> "Binding":
        """A binding of this graph with one input, made once."""
        if self._token is None:
            self._token = Binding(self.session, {name: value})
        return self._token

    def _probed(self, run: Any, first: Any, second: Any, n_tokens: int) -> Any:
        arguments = self.handle, self.kind, self.layer, self.expert, self.backend, self.tier << 32 | n_tokens
        try:
            result, spent_ns = probes.graph(run, first, second, *arguments)
        except Exception as error:
            raise run_error(self.kind, self.layer, error) from None
        self.log.graph(self.kind, self.backend, n_tokens, self.tier, spent_ns)
        return result


class Binding:
    """Inputs and outputs of a session at fixed addresses. Keeps the values alive."""

    def __init__(
        self, session: ort.InferenceSession, inputs: dict[str, ort.OrtValue], outputs: dict[str, ort.OrtValue] | None = None
    ):
        # The Python wrappers of session and binding cost as much as a small graph: use the wrapped objects.
        self._held = session.io_binding()
        self.raw, self.run = self._held._iobinding, session._sess.run_with_iobinding
        self._values: dict[str, ort.OrtValue] = {}
        for name, value in inputs.items():
            self.input(name, value)
        for name, value in (outputs or {}).items():
            self.output(name, value)

    def input(self, name: str, value: ort.OrtValue) -> None:
        """Bind an input."""
        if self._values.get(name) is not value:
            self._values[name] = value
            self.raw.bind_ortvalue_input(name, value._get_c_value())

    def output(self, name: str, value: ort.OrtValue) -> None:
        """Bind an output; binding it again redirects it to the new value."""
        if self._values.get(name) is not value:
            self._values[name] = value
            self.raw.bind_ortvalue_output(name, value._get_c_value())


def run_error(kind: Kind, layer: int, error: Exception) -> BackendError:
    """The exception to raise for a session's run that failed with `error`."""
    where = kind.name.lower() + (f" {layer}" if layer >= 0 else "")
    return BackendError(f"ONNX Runtime failed in {where} ({str(error).splitlines()[0]}): convert the model again")


def to_ort(array: np.ndarray) -> ort.OrtValue:
    """An ONNX Runtime value that shares the array's memory."""
    return ort.OrtValue.ortvalue_from_numpy(array)
