"""How the CPU keeps and runs experts: all share one session, whose inputs are the weights in memory.

So a miss costs only its read, and an eviction returns a buffer. ONNX Runtime's own MatMulNBits needs a session per expert,
whose prepacking takes two to four times as long as a read; with weights as inputs it is fifty times slower. Hence BlockMatMul
(block_products). An expert always runs in the same form, whatever the cache does, so that its result has the same bits.
"""

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort

from runtime.backends.cpu import CpuBackend
from runtime.backends.graph import Binding, Graph, to_ort
from runtime.cache_rules.forms import CPU, Form
from runtime.package.reader import BlockPool, Reader
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind


class CpuExpert(Graph):
    """One expert in memory. `weights`: inputs of a shared session; `block`: the memory that holds them, if not mapped."""

    def __init__(
        self, session: ort.InferenceSession, log: RunLog, form: Form, weights: dict[str, np.ndarray], block: np.ndarray | None
    ):
        super().__init__(session, log, Kind.EXPERT, form.layer, form.expert, CPU, 0)
        self.weights, self.block = weights, block

    def run(self, feeds: dict[str, np.ndarray], n_tokens: int) -> list[np.ndarray]:
        """Run over n_tokens rows."""
        return super().run(feeds | self.weights, n_tokens)

    def token_binding(self, name: str, value: ort.OrtValue) -> Binding:
        """A binding with one input and the weights, made once."""
        if self._token is None:
            weights = {weight: to_ort(array) for weight, array in self.weights.items()}
            self._token = Binding(self.session, {name: value} | weights)
        return self._token


class CpuExperts:
    """Reads experts from the package and makes them runnable; any thread may load.

    `mapped`: all experts stay and are used in the package's mapped files; otherwise each load is one read into a reused block.
    `between` is called between the pieces of a read.
    """

    def __init__(self, backend: CpuBackend, log: RunLog, mapped: bool, between: Callable[[], None] = lambda: None):
        self.backend, self.package, self.log, self.mapped = backend, backend.package, log, mapped
        self.reader, self.pool = Reader(between=between), BlockPool()
        self.session = backend.create("an expert", weights_as_inputs(onnx.load_model_from_string(self.package.graph("expert"))))

    def load(self, form: Form) -> CpuExpert:
        """The expert, ready to run."""
        memory, block = self._bring(form)
        return CpuExpert(self.session, self.log, form, *self._widened(self.package.expert_weights(memory), block))

    def give_back(self, expert: Graph) -> None:
        """Return the expert's block after its last use."""
        if isinstance(expert, CpuExpert) and expert.block is not None and not self.mapped:
            block, expert.block, expert.weights = expert.block, None, {}
            self.pool.give(block)

    @property
    def block_bytes(self) -> int:
        """Bytes of an expert's block."""
        return self.backend.expert_bytes if self.package.half_experts else self.package.expert_stride

    def weights_in(self, block: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs of the session that an expert in this block has."""
        if not self.package.half_experts:
            return self.package.expert_weights(block[: self.package.expert_bytes])
        return self._wide_weights(self.package.expert_weights(block[: self.package.expert_bytes]), block)

    def widen(self, block: np.ndarray) -> None:
        """Widen half-precision matrices that were read to the end of the block."""
        read = block[len(block) - self.package.expert_stride :][: self.package.expert_bytes].copy()
        weights = self.package.expert_weights(read)
        for name, wide in self._wide_weights(weights, block).items():
            wide[...] = weights[name]

    def expert_in(self, block: np.ndarray, form: Form) -> CpuExpert:
        """The expert that is in this block."""
        return CpuExpert(self.session, self.log, form, self.weights_in(block), block)

    def close(self) -> None:
        """Close the package's files."""
        self.reader.close()

    def _bring(self, form: Form) -> tuple[np.ndarray, np.ndarray | None]:
        """(the expert's bytes, the block that they were read into, if any)."""
        if self.mapped:
            self.package.resident(self.package.expert_range(form.layer, form.expert).path)
            return self.package.mapped_expert(form.layer, form.expert), None
        block = self.pool.take(self.package.expert_stride)
        return self.reader.read(self.package.expert_range(form.layer, form.expert), block), block

    def _widened(
        self, weights: dict[str, np.ndarray], block: np.ndarray | None
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Widen half-precision matrices to float32 in a separate block: a graph that casts at every run is ten times slower."""
        if not self.package.half_experts:
            return weights, block
        wide = self.pool.take(self.backend.expert_bytes)
        wider = self._wide_weights(weights, wide)
        for name, value in weights.items():
            wider[name][...] = value
        if block is not None:
            self.pool.give(block)
        return wider, wide

    @staticmethod
    def _wide_weights(weights: dict[str, np.ndarray], block: np.ndarray) -> dict[str, np.ndarray]:
        """Views of the block, one after another, with the shapes of these weights in float32."""
        views, end = {}, 0
        for name, value in weights.items():
            views[name] = block[end : end + 4 * value.size].view(np.float32).reshape(value.shape)
            end += 4 * value.size
        return views


def weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with weights as inputs, half-precision matrices as float32 inputs without their casts; integer constants stay."""
    constants = [tensor for tensor in model.graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL]
    weights = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    names = {tensor.name for tensor in weights}
    multiplied = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    casts = [
        node for node in model.graph.node if node.op_type == "Cast" and {*node.input} <= names and node.output[0] in multiplied
    ]
    renamed = {node.output[0]: node.input[0] for node in casts}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node not in casts:
            node.input[:] = [renamed.get(name, name) for name in node.input]
            nodes.append(node)
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    widened = set(renamed.values())
    for tensor in weights:
        dtype = onnx.TensorProto.FLOAT if tensor.name in widened else tensor.data_type
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, dtype, tensor.dims))
    model.graph.initializer.extend(constants)
    return model
