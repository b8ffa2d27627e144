"""What becomes of answers on their way out: the response cache, and the order of requests."""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
from bound import FLOATS_IN_AND_OUT, TIMEOUT_S, ask, free_server, infer
from processes import until, wait_until

from gpuserve import ModelConfig, Server
from gpuserve.model.declaration import DynamicBatcher


class Counts:
    """Answers with how often it was called."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, requests: Any) -> Any:
        self._calls += 1
        if requests[0].parameters.get("fail"):
            raise ValueError("as was asked for")
        return [{"OUTPUT_1": np.full((len(one["INPUT_1"]), 1), self._calls, np.float32)} for one in requests]


class FirstWaits:
    """The answer to 1 is ready only when its file is there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __call__(self, requests: Any) -> Any:
        if requests[0]["INPUT_1"][0, 0] == 1:
            await until(self._path.exists, TIMEOUT_S)
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


@pytest.mark.thorough
def test_without_memory_the_model_is_run_each_time() -> None:
    with free_server() as server:
        server.bind("counts", Counts(), config=ModelConfig(response_cache=True), **FLOATS_IN_AND_OUT)
        server.run()
        assert [ask(server, "counts", 1.0) for _ in range(2)] == [[1], [2]]


async def ask_in_order(server: Server, directory: Path, values: Sequence[int]) -> list[int]:
    """The values in the order in which their answers come; each is asked when those before it run. The first
    is answered when the callable has answered all others.
    """
    came: list[int] = []
    async with grpc_aio.InferenceServerClient(server.addresses["grpc"]) as client:

        async def one(value: int) -> None:
            await client.infer("model", tensor(value), client_timeout=TIMEOUT_S)
            came.append(value)

        calls = []
        for n_running, value in enumerate(values):
            await eventually(server, "gpuserve_running_requests", n_running)
            calls.append(asyncio.ensure_future(one(value)))
        await eventually(server, "gpuserve_requests_success_total", len(values) - 1)
        (directory / "answer").touch()
        await asyncio.gather(*calls)
    return came


def tensor(value: int) -> list[Any]:
    made = grpc_aio.InferInput("INPUT_1", [1, 1], "FP32")
    made.set_data_from_numpy(np.full((1, 1), value, np.float32))
    return [made]


async def eventually(server: Server, name: str, value: int) -> None:
    await asyncio.to_thread(wait_until, lambda: metric(server, name, "model") == value, f"{name} is {value}")


@contextlib.contextmanager
def first_waits(directory: Path, batcher: DynamicBatcher) -> Iterator[Server]:
    with free_server() as server:
        config = ModelConfig(max_batch_size=1, batcher=batcher)
        server.bind("model", FirstWaits(directory / "answer"), config=config, **FLOATS_IN_AND_OUT)
        server.run()
        yield server


@pytest.mark.thorough
@pytest.mark.parametrize(("preserve", "order"), [(True, [1, 2]), (False, [2, 1])])
def test_answers_may_be_kept_in_the_order_of_their_requests(
    preserve: bool, order: list[int], tmp_path: Path
) -> None:
    with first_waits(tmp_path, DynamicBatcher(preserve_ordering=preserve)) as server:
        assert asyncio.run(ask_in_order(server, tmp_path, [1, 2])) == order


@pytest.mark.thorough
def test_an_answer_that_nobody_waits_for_holds_nobody_up(tmp_path: Path) -> None:
    async def leave_and_ask(server: Server) -> None:
        async with grpc_aio.InferenceServerClient(server.addresses["grpc"]) as client:
            left = asyncio.ensure_future(client.infer("model", tensor(1)))
            await eventually(server, "gpuserve_running_requests", 1)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            await client.infer("model", tensor(2), client_timeout=TIMEOUT_S)
        (tmp_path / "answer").touch()

    with first_waits(tmp_path, DynamicBatcher(preserve_ordering=True)) as server:
        asyncio.run(leave_and_ask(server))
        wait_until(lambda: metric(server, "gpuserve_running_requests", "model") == 0, "both have run")
