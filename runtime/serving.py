"""How the CPU runs an expert that one read has brought: which form is cheapest depends on the operators of its graph.

Measured, ms to create and to run one row (hidden 2048, inter 1408, one thread):

    fp32   MatMul                 own session 36-60 and 3.3; one session for all experts, weights fed as inputs: 0 and 3.4
    int8   DynamicQuantizeMatMul  prepacked 6 and 0.20; weights as inputs 0 and 0.9, the same bits
    int4   MatMulNBits            prepacked 5-11 and 0.2; not prepacked 0.4 and 20, other bits

So fp32 experts share one session whatever their number: a miss costs its read and nothing else, an eviction gives a buffer back,
and the bits are always the same (prepacking fp32 changes the last bit). int8 experts begin like that and are prepacked in the
background after PROMOTE_AFTER runs; int4 experts are prepacked at once.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from runtime.cpu import forget_model_bytes, session_options
from runtime.errors import BackendError, PackageError
from runtime.expert_store import ExpertStore
from runtime.graph import CPU, Graph
from runtime.loader import Loader
from runtime.log import RunLog
from runtime.policies import Form
from runtime.probes import Kind
from runtime.reader import REMEDY, BlockPool, Reader, aligned

PROMOTE_AFTER = 8
LATER = 1e9  # urgency of a promotion: after every load


class Serving(Enum):
    """What an expert's graph is best served as."""

    SHARED = "weights are inputs of one session"
    PROMOTED = "shared at first, a prepacked session once hot"
    PREPACKED = "a prepacked session at once"


BY_OPERATOR = {"MatMulNBits": Serving.PREPACKED, "DynamicQuantizeMatMul": Serving.PROMOTED}


def serving_of(skeleton: onnx.ModelProto) -> Serving:
    """The form for experts of this graph."""
    found = {BY_OPERATOR.get(node.op_type, Serving.SHARED) for node in skeleton.graph.node}
    return next((form for form in (Serving.PREPACKED, Serving.PROMOTED) if form in found), Serving.SHARED)


def filled(skeleton: onnx.ModelProto, weights: dict[str, np.ndarray]) -> bytes:
    """The serialized graph with its weights inside, not as inputs."""
    model = onnx.ModelProto()
    model.CopyFrom(skeleton)
    inputs = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    serialized: bytes = model.SerializeToString()
    return serialized


class CpuExpert(Graph):
    """One expert in memory. `block` holds its weights while it is served from them."""

    def __init__(self, owner: "CpuExperts", form: Form, session: ort.InferenceSession, weights: dict[str, np.ndarray]):
        super().__init__(session, owner.log, Kind.EXPERT, form.layer, form.expert, CPU, 0)
        self.owner, self.weights = owner, weights
        self.block: np.ndarray | None = None
        self._runs = 0
        self._promotion: Future[ort.InferenceSession] | None = None

    def run(self, feeds: dict[str, np.ndarray], n_tokens: int) -> list[np.ndarray]:
        """Run over n_tokens rows, prepacked as soon as that session is ready."""
        if self._promotion and self._promotion.done() and not self._promotion.cancelled():
            self.session, self._promotion, self.weights = self._promotion.result(), None, {}
            self.owner.give_back(self)
        outputs = super().run(feeds | self.weights, n_tokens)
        self._runs += 1
        if self._runs == PROMOTE_AFTER and self.weights:
            self._promotion = self.owner.promote(self)
        return outputs


class CpuExperts:
    """Reads experts from the package and makes them runnable; any thread may load."""

    def __init__(self, store: ExpertStore, log: RunLog, loader: Loader | None):
        self.store, self.log, self.loader = store, log, loader
        self.reader, self.pool = Reader(), BlockPool()
        self._skeleton = store.skeleton()
        self.serving = serving_of(self._skeleton)
        self._shared = self._session(self._skeleton.SerializeToString()) if self.serving is not Serving.PREPACKED else None
        self._verified: set[tuple[int, int]] = set()

    def load(self, form: Form) -> CpuExpert:
        """Read the expert; its content is checked against the manifest the first time."""
        place = self.store.where(form.layer, form.expert)
        block = self.pool.take(place.bytes + place.offset % aligned(1))
        content = self.reader.read(place, block)
        self._verify(form, content)
        weights = self.store.weights(content)
        if self._shared is None:
            expert = CpuExpert(self, form, self._session(filled(self._skeleton, weights)), {})
            del content, weights
            self.pool.give(block)
            return expert
        expert = CpuExpert(self, form, self._shared, weights)
        expert.block = block
        return expert

    def give_back(self, expert: Graph) -> None:
        """The expert's block is needed no more."""
        if isinstance(expert, CpuExpert) and expert.block is not None:
            block, expert.block = expert.block, None
            expert.weights = {}
            if expert._promotion is None or expert._promotion.cancel() or expert._promotion.done():
                self.pool.give(block)

    def promote(self, expert: CpuExpert) -> "Future[ort.InferenceSession] | None":
        """Prepack the expert's weights in the background, where its form gains by it."""
        if self.serving is not Serving.PROMOTED or self.loader is None:
            return None
        weights = expert.weights
        work: Callable[[], ort.InferenceSession] = lambda: self._session(filled(self._skeleton, weights))  # noqa: E731
        return self.loader.submit(work, LATER)

    def close(self) -> None:
        """Close the package's files."""
        self.reader.close()

    def _verify(self, form: Form, content: np.ndarray) -> None:
        key = (form.layer, form.expert)
        if key not in self._verified:
            if hashlib.sha256(content.data).hexdigest() != self.store.digest(*key):
                where = self.store.where(*key).path
                raise PackageError(f"expert {form.expert} of layer {form.layer} in {where} is damaged: {REMEDY}")
            self._verified.add(key)

    def _session(self, model: bytes) -> ort.InferenceSession:
        options = session_options()
        options.enable_cpu_mem_arena = False
        try:
            session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        except Exception as error:
            raise BackendError(f"ONNX Runtime refuses an expert on CPU ({str(error).splitlines()[0]}): convert again") from None
        forget_model_bytes(session)
        return session
