"""What becomes of answers on their way out: the response cache, and the order of requests."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
from bound import FLOATS_IN_AND_OUT, TIMEOUT_S, ask, free_server, infer, status
from processes import wait_until

from gpuserve import ModelConfig, Server
from gpuserve.declare.model import DynamicBatcher


class Counts:
    """Answers with how often it was called."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, requests: Any) -> Any:
        self._calls += 1
        if requests[0].parameters.get("fail"):
            raise ValueError("as was asked for")
        return [{"OUTPUT_1": np.full((len(one["INPUT_1"]), 1), self._calls, np.float32)} for one in requests]


class LastFirst:
    """The answer to 1 is ready only when 2 has been asked."""

    def __init__(self) -> None:
        self._asked: asyncio.Event | None = None

    async def __call__(self, requests: Any) -> Any:
        self._asked = self._asked or asyncio.Event()
        if requests[0]["INPUT_1"][0, 0] == 2:
            self._asked.set()
        else:
            await self._asked.wait()
            await asyncio.sleep(0.1)  # the answer to 2 has been read by then
        return [{"OUTPUT_1": one["INPUT_1"]} for one in requests]


def metric(server: Server, name: str, model: str) -> float:
    with urllib.request.urlopen(server.addresses["metrics"], timeout=TIMEOUT_S) as page:
        found = re.search(rf'^{name}{{model="{model}"[^}}]*}} (\S+)$', page.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.fixture
def cached() -> Iterator[Server]:
    with free_server(response_cache_nbytes=1 << 20) as server:
        server.bind("counts", Counts(), config=ModelConfig(response_cache=True), **FLOATS_IN_AND_OUT)
        server.run()
        yield server


def test_a_request_that_was_seen_before_is_answered_from_memory(cached: Server) -> None:
    assert [ask(cached, "counts", 1.0) for _ in range(3)] == [[1], [1], [1]]
    assert ask(cached, "counts", 2.0) == [2]
    assert ask(cached, "counts", 1.0) == [1]
    assert metric(cached, "gpuserve_cache_hits_total", "counts") == 3
    assert metric(cached, "gpuserve_cache_misses_total", "counts") == 2


@pytest.mark.thorough
def test_parameters_make_another_request(cached: Server) -> None:
    one = np.ones((1, 1), np.float32)
    assert infer(cached, "counts", {"seed": 1}, INPUT_1=one)["OUTPUT_1"].tolist() == [[1]]
    assert infer(cached, "counts", {"seed": 2}, INPUT_1=one)["OUTPUT_1"].tolist() == [[2]]
    assert infer(cached, "counts", {"seed": 1}, INPUT_1=one)["OUTPUT_1"].tolist() == [[1]]


def test_errors_are_not_kept(cached: Server) -> None:
    one = np.ones((1, 1), np.float32)
    for _ in range(2):
        with pytest.raises(Exception, match="as was asked for"):
            infer(cached, "counts", {"fail": True}, INPUT_1=one)
    assert ask(cached, "counts", 1.0) == [3]


def test_without_memory_the_model_is_run_each_time() -> None:
    with free_server() as server:
        server.bind("counts", Counts(), config=ModelConfig(response_cache=True), **FLOATS_IN_AND_OUT)
        server.run()
        assert [ask(server, "counts", 1.0) for _ in range(2)] == [[1], [2]]


async def finished_in(server: Server, *values: float) -> list[float]:
    """The values in the order in which their answers came; each is asked when those before are running."""
    order: list[float] = []
    async with grpc_aio.InferenceServerClient(server.addresses["grpc"]) as client:

        async def one(value: float) -> None:
            tensor = grpc_aio.InferInput("INPUT_1", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
            await client.infer("model", [tensor], client_timeout=TIMEOUT_S)
            order.append(value)

        calls = []
        for number, value in enumerate(values):
            await asyncio.to_thread(wait_until, lambda n=number: running(server) >= n, "the others run")
            calls.append(asyncio.ensure_future(one(value)))
        await asyncio.gather(*calls)
    return order


def running(server: Server) -> float:
    return metric(server, "gpuserve_running_requests", "model")


@pytest.mark.thorough
@pytest.mark.parametrize(("preserve", "order"), [(True, [1, 2]), (False, [2, 1])])
def test_answers_may_be_kept_in_the_order_of_their_requests(preserve: bool, order: list[float]) -> None:
    batcher = DynamicBatcher(preserve_ordering=preserve)
    with free_server() as server:
        config = ModelConfig(max_batch_size=1, batcher=batcher)
        server.bind("model", LastFirst(), config=config, **FLOATS_IN_AND_OUT)
        server.run()
        assert asyncio.run(finished_in(server, 1, 2)) == order


def test_an_answer_that_nobody_waits_for_holds_nobody_up() -> None:
    async def leave_and_ask(server: Server) -> None:
        async with grpc_aio.InferenceServerClient(server.addresses["grpc"]) as client:
            tensor = grpc_aio.InferInput("INPUT_1", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
            with pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
                await client.infer("model", [tensor], client_timeout=0.2)
        assert await finished_in(server, 2) == [2]

    with free_server() as server:
        config = ModelConfig(max_batch_size=1, batcher=DynamicBatcher(preserve_ordering=True))
        server.bind("model", LastFirst(), config=config, **FLOATS_IN_AND_OUT)
        server.run()
        assert status(server, "/v2/health/ready") == 200
        asyncio.run(leave_and_ask(server))
