"""How the CPU keeps experts and runs them: which form is cheapest depends on the operators of their graph.

Measured on two cores, one expert of hidden 2048 and inter 1408, ms to create, to run 1 row and 32 rows:

    fp32, fp16  MatMul       own session, prepacked 36-60, 3.3, 18; one session fed with the weights 0, 3.4, 36, other bits
    8 and 4 bit MatMulNBits  own session, prepacked 4-11, 0.2, 4-8; not prepacked or fed with the weights 0.4, 20 and more

So float experts share one session whatever their number: a miss costs its read and nothing else, an eviction gives a buffer
back. Quantized ones get a session each. An expert is served in one form whatever the cache does, so that its bits are the same.
"""

import numpy as np
import onnx
import onnxruntime as ort

from runtime.cpu import CpuBackend, session_options
from runtime.graph import CPU, Binding, Graph, shared
from runtime.log import RunLog
from runtime.policies import Form
from runtime.probes import Kind
from runtime.reader import BlockPool, Reader

PREPACKED = {"MatMulNBits"}


class CpuExpert(Graph):
    """One expert in memory. `weights` are fed to a shared session; `block` is memory that must stay while it may run."""

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
            weights = {weight: shared(array) for weight, array in self.weights.items()}
            self._token = Binding(self.session, {name: value} | weights)
        return self._token


class CpuExperts:
    """Brings experts from the package and makes them runnable; any thread may load.

    `mapped`: all experts stay, and are used where the package's files are mapped; else each load is one read into a reused block.
    """

    def __init__(self, backend: CpuBackend, log: RunLog, mapped: bool):
        self.backend, self.package, self.log, self.mapped = backend, backend.package, log, mapped
        self.reader, self.pool = Reader(), BlockPool()
        model = onnx.load_model_from_string(self.package.graph("expert"))
        self._prepacked = any(node.op_type in PREPACKED for node in model.graph.node)
        self._graph = (model if self._prepacked else weights_as_inputs(model)).SerializeToString()
        self._shared = None if self._prepacked else backend.create("an expert", self._graph, session_options())
        self._keeps_blocks = not self._prepacked or not self._copies_weights()

    def load(self, form: Form) -> CpuExpert:
        """The expert, ready to run."""
        memory, block = self._bring(form)
        weights = self.package.expert_weights(memory)
        if self._shared is not None:
            return CpuExpert(self._shared, self.log, form, *self._widened(weights, block))
        session = self._own_session(weights)
        if block is None:
            # What ONNX Runtime wanted in another layout it has copied by now; the rest comes back when touched.
            self.package.forget_expert(form.layer, form.expert)
            return CpuExpert(session, self.log, form, {}, memory)
        if self._keeps_blocks:
            return CpuExpert(session, self.log, form, {}, block)
        self.pool.give(block)
        return CpuExpert(session, self.log, form, {}, None)

    def give_back(self, expert: Graph) -> None:
        """The expert's block is needed no more."""
        if isinstance(expert, CpuExpert) and expert.block is not None and not self.mapped:
            block, expert.block, expert.weights = expert.block, None, {}
            self.pool.give(block)

    def close(self) -> None:
        """Close the package's files."""
        self.reader.close()

    def _bring(self, form: Form) -> tuple[np.ndarray, np.ndarray | None]:
        """The expert's bytes, and the block they were read into, if any."""
        if self.mapped:
            return self.package.mapped_expert(form.layer, form.expert), None
        block = self.pool.take(self.package.expert_stride)
        return self.reader.read(self.package.expert_place(form.layer, form.expert), block), block

    def _widened(
        self, weights: dict[str, np.ndarray], block: np.ndarray | None
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Half-precision weights in float32, in a block of their own: a graph that casts at every run is ten times slower."""
        if not any(value.dtype == np.float16 for value in weights.values()):
            return weights, block
        wide, end, wider = self.pool.take(self.backend.expert_bytes), 0, {}
        for name, value in weights.items():
            wider[name] = wide[end : end + 4 * value.size].view(np.float32).reshape(value.shape)
            wider[name][...] = value
            end += 4 * value.size
        if block is not None:
            self.pool.give(block)
        return wider, wide

    def _own_session(self, weights: dict[str, np.ndarray]) -> ort.InferenceSession:
        options = session_options()
        options.add_external_initializers(list(weights), [shared(value) for value in weights.values()])
        return self.backend.create("an expert", self._graph, options)

    def _copies_weights(self) -> bool:
        """Does a prepacked session do without the memory that its weights came from? Tried out: nothing documents it."""
        layer = min(set(range(self.package.family.layers)) - self.package.family.dense)
        memory = self.package.mapped_expert(layer, 0).copy()
        session = self._own_session(self.package.expert_weights(memory))
        feeds = {"rows": np.ones((1, self.package.family.hidden), np.float32)}
        before = session.run(None, feeds)[0]
        memory[...] = 0
        return np.array_equal(before, session.run(None, feeds)[0])


def weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its weights turned into inputs of float32, without the casts to it; integer constants stay."""
    constants = [tensor for tensor in model.graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL]
    weights = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    names = {tensor.name for tensor in weights}
    casts = [node for node in model.graph.node if node.op_type == "Cast" and node.input[0] in names]
    renamed = {node.output[0]: node.input[0] for node in casts}
    for node in casts:
        model.graph.node.remove(node)
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    model.graph.input.extend(onnx.helper.make_tensor_value_info(t.name, onnx.TensorProto.FLOAT, t.dims) for t in weights)
    del model.graph.initializer[:]
    model.graph.initializer.extend(constants)
    return model
