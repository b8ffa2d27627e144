"""PyTriton's way to the model that is served, and spans of one's own."""

from __future__ import annotations

from contextlib import nullcontext
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest

from gpuserve.compat.pytriton import decorators, proxy
from gpuserve.compat.pytriton.exceptions import PyTritonValidationError
from gpuserve.compat.pytriton.model_config import TensorSpec, TritonModelConfig
from gpuserve.compat.pytriton.proxy import Request
from gpuserve_worker.inference.model_context import ModelContext, enter_model
from gpuserve_worker.protocol.tensor import TensorSpec as DeclaredTensor

MODEL = ModelContext(
    "m",
    2,
    "0",
    "cpu",
    (DeclaredTensor("x", "FP32", (-1,), True),),
    (DeclaredTensor("y", "BYTES", (1,)), DeclaredTensor("z", "BOOL", ())),
    8,
    (4,),
    False,
)


def served(function: Any) -> Any:
    """What a function returns that a server calls."""

    def call() -> Any:
        enter_model(MODEL)
        return function()

    return copy_context().run(call)


def test_the_model_is_given_as_an_argument() -> None:
    @decorators.batch
    @decorators.triton_context
    def infer(x: Any, triton_context: Any) -> Any:
        assert triton_context.model_configs[infer] == triton_context.model_config
        assert infer in triton_context.model_configs
        config = triton_context.model_config
        assert (config.model_name, config.model_version, config.max_batch_size) == ("m", 2, 8)
        assert config.inputs == [TensorSpec("x", (-1,), np.float32, optional=True)]
        assert [one.dtype for one in config.outputs] == [np.bytes_, bool]
        assert config.batcher.preferred_batch_size == [4]
        return [x, x]

    (answer,) = served(lambda: infer([Request({"x": np.ones((2, 1))})]))
    assert answer["OUTPUT_1"].shape == (2, 1)


def test_without_a_server_there_is_no_model() -> None:
    infer = decorators.triton_context(lambda requests, triton_context: triton_context)
    with pytest.raises(PyTritonValidationError, match="must bound with triton to get  __triton_context__"):
        infer([])


def test_decorators_of_ones_own_know_the_model() -> None:
    def infer() -> None: ...

    config = served(lambda: decorators.get_model_config(infer, None))
    assert served(lambda: decorators.get_triton_context(infer, None).model_configs[infer]) == config


def test_outputs_by_name() -> None:
    given = {"y": 1}
    assert decorators.convert_output(given) is given
    assert served(lambda: decorators.convert_output([1, 2])) == {"y": 1, "z": 2}
    config = TritonModelConfig("m", outputs=[TensorSpec("only", (1,), np.float32)])
    assert decorators.convert_output((3,), model_config=config) == {"only": 3}
    with pytest.raises(PyTritonValidationError, match="returned 2 outputs, but the model declares 1: only"):
        decorators.convert_output([1, 2], model_config=config)


def test_configs_by_callable() -> None:
    class Model:
        def __call__(self) -> None: ...

        def other(self) -> None: ...

    model, config = Model(), TritonModelConfig("m")
    configs = decorators.ModelConfigDict()
    configs[model.__call__] = config
    assert configs[model] is config
    assert (list(configs), len(configs), model.other in configs) == ([model.__call__], 1, False)
    del configs[model]
    assert not configs


def test_rows_of_a_request() -> None:
    assert decorators.get_inference_request_batch_size(Request({"x": np.ones((3, 2))})) == 3


def test_spans_do_nothing_without_a_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_tracer", None)
    request = Request({})
    with proxy.traced_span(request, "work"), request.traced_span("work"):
        assert proxy.get_telemetry_tracer() is None

    class Tracer:
        names: list[str] = []  # noqa: RUF012

        def start_as_current_span(self, name: str) -> Any:
            self.names.append(name)
            return nullcontext()

    tracer = Tracer()
    proxy.set_telemetry_tracer(tracer)
    with proxy.traced_span(request, "work"):
        assert tracer.names == ["work"]
    with pytest.raises(ValueError, match="Telemetry tracer is already set"):
        proxy.set_telemetry_tracer(tracer)
    with pytest.raises(PyTritonValidationError, match="not made of trace_config"):
        proxy.build_proxy_tracer_from_triton_config(["mode=opentelemetry"])
