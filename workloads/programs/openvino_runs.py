"""Runs a small image model with OpenVINO in each way that its API has, and logs when; loads it from its cache as well.

Argument: a folder for the cache. Prints {way: [[begin_ns, end_ns], ...]} as JSON, in CLOCK_MONOTONIC.
"""

import json
import sys
import time
from collections import defaultdict

import numpy as np
import openvino
import openvino.opset13 as op

IMAGE = np.zeros((1, 3, 32, 32), np.float32)
RUNS, QUEUED = 20, 15


def image_model() -> openvino.Model:
    """A convolution, and the mean of its outputs."""
    image = op.parameter(list(IMAGE.shape), openvino.Type.f32, name="image")
    filters = op.constant(np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(np.float32))
    seen = op.relu(op.convolution(image, filters, [1, 1], [1, 1], [1, 1], [1, 1]))
    return openvino.Model([op.result(op.reduce_mean(seen, op.constant([2, 3]), False))], [image], "image")


class Log:
    """When each call began and ended."""

    def __init__(self) -> None:
        self.calls: dict[str, list[list[int]]] = defaultdict(list)

    def call(self, way: str, *arguments: object) -> None:
        """Call the first of `arguments` with the others."""
        begin = time.monotonic_ns()
        arguments[0](*arguments[1:])  # type: ignore[operator]
        self.calls[way].append([begin, time.monotonic_ns()])


def run_in_every_way(model: openvino.CompiledModel, log: Log) -> None:
    """Run it synchronously, asynchronously with both waits, and through a queue of two requests."""
    request, inputs = model.create_infer_request(), {0: IMAGE}
    for _ in range(RUNS):
        log.call("infer", request.infer, inputs)
    for way in (request.wait, lambda: request.wait_for(60_000)):
        log.call("start_async", request.start_async, inputs)
        log.call("wait_async", way)
    queue = openvino.AsyncInferQueue(model, 2)
    for _ in range(QUEUED):
        queue.start_async(inputs)
    queue.wait_all()


if __name__ == "__main__":
    log, core, model = Log(), openvino.Core(), image_model()
    try:
        core.compile_model(model, "ABSENT")
    except RuntimeError:
        log.calls["refused"].append([0, 0])
    core.set_property({"CACHE_DIR": sys.argv[1]})
    for way in ("compile", "load"):
        log.call(way, core.compile_model, model, "CPU")
    run_in_every_way(core.compile_model(model, "CPU"), log)
    print(json.dumps(log.calls))
