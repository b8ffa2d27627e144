"""What a tracer notes of requests: not more than can be written."""

from __future__ import annotations

import asyncio

from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.model_tracer import MAX_STREAM_NBYTES, MAX_TENSOR_NBYTES, ModelTracer, trace_ids
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.observability.tracing.request_trace import Trace
from gpuserve.front.observability.tracing.trace_settings import Sampler, TraceLevel, TraceValues
from gpuserve.front.requests.inference import InferRequest, InferResponse, InputTensor, OutputTensor
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec

SPEC = ModelSpec(
    "m",
    (TensorSpec("x", "UINT8", (-1,)),),
    (TensorSpec("y", "UINT8", (-1,)),),
    0,
    (InstanceSpec("cpu#0", "cpu", {}),),
    decoupled=True,
)


async def test_a_stream_that_goes_on_for_ever_is_noted_up_to_a_limit() -> None:
    traces: list[Trace] = []
    heard: list[InferResponse] = []
    responses = 3 * MAX_STREAM_NBYTES // MAX_TENSOR_NBYTES
    driver = ModelDriver(SPEC, 1 << 20, ModelMetrics("m", "1", dict))
    sampler = Sampler(TraceValues(TraceLevel.TENSORS.value, 1, -1, 0))
    driver.tracer = ModelTracer(SPEC, sampler, "", trace_ids(1), set(), traces.append, follows_callers=False)
    asked = InferRequest("m", "", "", {}, [InputTensor("x", "UINT8", (1,), b"1")], (), None)
    pending = driver.submit(asked, heard.append)
    assert pending.on_response is not None
    output = OutputTensor("y", "UINT8", (MAX_TENSOR_NBYTES,), bytes(MAX_TENSOR_NBYTES))
    for _ in range(responses):
        pending.on_response(InferResponse("m", "1", "", {}, [output]))
    driver.close()
    await asyncio.sleep(0)
    assert len(heard) == responses
    (trace,) = traces
    assert not driver.tracer.live, "later batches are not looked at"
    assert MAX_STREAM_NBYTES - MAX_TENSOR_NBYTES < trace.nbytes < MAX_STREAM_NBYTES + MAX_TENSOR_NBYTES
