"""Priorities and queue policies of bound models, over both protocols. Each model runs one request at a
time, when the test lets it.
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from bound import InBackground, Refused, free_server
from bound import infer as infer_http
from processes import wait_until
from tritonclient.utils import InferenceServerException

from gpuserve import DynamicBatcher, ModelConfig, Server, Tensor
from gpuserve.declare.model import QueuePolicy, TimeoutAction
from gpuserve.decorators import batch

MINUTE_US = 60_000_000
NUMBER = Tensor((1,), np.int32)
REJECT, DELAY = TimeoutAction.REJECT, TimeoutAction.DELAY
BATCHERS = {
    "levels": DynamicBatcher(priority_levels=3, default_priority_level=2),
    "hasty": DynamicBatcher(default_queue_policy=QueuePolicy(REJECT, 200_000)),
    "shortened": DynamicBatcher(default_queue_policy=QueuePolicy(REJECT, MINUTE_US, True)),
    "patient": DynamicBatcher(default_queue_policy=QueuePolicy(DELAY, MINUTE_US, True)),
    "narrow": DynamicBatcher(
        priority_levels=2,
        default_priority_level=2,
        priority_queue_policy={1: QueuePolicy(max_queue_size=1)},
    ),
}


class Gate:
    """A model that remembers what it runs, and ends a run when it is let."""

    def __init__(self, server: Server, name: str) -> None:
        self.seen: list[int] = []
        self._server = server
        self._name = name
        self._let = threading.Semaphore(0)
        config = ModelConfig(max_batch_size=1, batcher=BATCHERS[name])
        server.bind(name, self._run, [NUMBER], [NUMBER], config=config, isolation="thread")

    @batch
    def _run(self, INPUT_1: Any) -> Any:
        self.seen.append(int(INPUT_1[0, 0]))
        assert self._let.acquire(timeout=30)
        return [INPUT_1]

    def let(self, count: int) -> None:
        self._let.release(count)

    def send(self, protocol: str, number: int, **parameters: int) -> InBackground:
        """A request that is running or queued when this returns, or was refused."""
        before = self.accepted()
        asked = InBackground(self._http if protocol == "http" else self._grpc, number, parameters)
        wait_until(lambda: self.accepted() > before or not asked.thread.is_alive(), f"{number} is there")
        return asked

    def _http(self, number: int, parameters: dict[str, int]) -> None:
        infer_http(self._server, self._name, parameters, INPUT_1=np.full((1, 1), number, np.int32))

    def _grpc(self, number: int, parameters: dict[str, int]) -> None:
        sent = tritonclient.grpc.InferInput("INPUT_1", [1, 1], "INT32")
        sent.set_data_from_numpy(np.full((1, 1), number, np.int32))
        address = self._server.addresses["grpc"].rpartition("/")[2]
        with tritonclient.grpc.InferenceServerClient(address) as client:
            client.infer(self._name, [sent], **parameters)

    def accepted(self) -> float:
        """How many requests wait, run or have come to an end."""
        return self.metric(
            "queue_requests", "running_requests", "requests_success_total", "requests_failure_total"
        )

    def metric(self, *names: str) -> float:
        with urllib.request.urlopen(self._server.addresses["metrics"], timeout=10) as page:
            lines = page.read().decode().splitlines()
        starts, label = tuple(f"gpuserve_{name}{{" for name in names), f'model="{self._name}"'
        found = [float(one.rsplit(" ", 1)[1]) for one in lines if one.startswith(starts) and label in one]
        assert len(found) >= len(names)
        return sum(found)


@pytest.fixture(scope="module")
def gates() -> Iterator[dict[str, Gate]]:
    with free_server() as server:
        made = {name: Gate(server, name) for name in BATCHERS}
        server.run()
        yield made
        for gate in made.values():
            gate.let(100)  # after a failure something may still run


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def refusal(asked: InBackground) -> tuple[str, str]:
    """The code of an error, and its text."""
    with pytest.raises((Refused, InferenceServerException)) as raised:
        asked.result()
    error = raised.value
    if isinstance(error, Refused):
        return {503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}[error.status], error.text
    assert isinstance(error, InferenceServerException)
    return error.status().removeprefix("StatusCode."), error.message()


def test_higher_levels_run_first(gates: dict[str, Gate], protocol: str) -> None:
    gate = gates["levels"]
    calls = [gate.send(protocol, 100)]
    for number, priority in enumerate((3, 0, 1, 99, 2, 1)):
        calls.append(gate.send(protocol, number, **({"priority": priority} if priority else {})))
    gate.let(len(calls))
    for call in calls:
        call.result()
    assert gate.seen[-7:] == [100, 2, 5, 1, 3, 4, 0]


def test_a_request_that_waited_too_long_is_rejected_and_never_runs(
    gates: dict[str, Gate], protocol: str
) -> None:
    gate = gates["hasty"]
    failed = gate.metric("requests_failure_total")
    running = gate.send(protocol, 1)
    late = gate.send(protocol, 2)
    assert refusal(late) == (
        "UNAVAILABLE",
        "Request timeout expired: model 'hasty' lets this request wait 0.2 s",
    )
    gate.let(1)
    running.result()
    assert gate.seen[-1] == 1
    assert gate.metric("requests_failure_total") == failed + 1
    assert gate.metric("arena_blocks") == 0


def test_a_client_may_shorten_its_time_where_the_policy_lets_it(
    gates: dict[str, Gate], protocol: str
) -> None:
    gate = gates["shortened"]
    running = gate.send(protocol, 1)
    late = gate.send(protocol, 2, timeout=100_000)
    assert refusal(late) == (
        "UNAVAILABLE",
        "Request timeout expired: model 'shortened' lets this request wait 0.1 s",
    )
    gate.let(1)
    running.result()
    assert gate.seen[-1] == 1


def test_a_delayed_request_runs_after_the_others_and_is_not_refused(
    gates: dict[str, Gate], protocol: str
) -> None:
    gate = gates["patient"]
    calls = [gate.send(protocol, 1), gate.send(protocol, 2, timeout=1), gate.send(protocol, 3)]
    gate.let(len(calls))
    for call in calls:
        call.result()
    assert gate.seen[-3:] == [1, 3, 2]


def test_a_full_level_refuses_and_the_others_do_not(gates: dict[str, Gate], protocol: str) -> None:
    gate = gates["narrow"]
    rejected = gate.metric("rejected_total")
    calls = [gate.send(protocol, 1), gate.send(protocol, 2, priority=1)]
    full = gate.send(protocol, 3, priority=1)
    assert refusal(full) == ("UNAVAILABLE", "Exceeds maximum queue size of 1 requests of priority 1")
    calls.append(gate.send(protocol, 4))
    gate.let(len(calls))
    for call in calls:
        call.result()
    assert gate.seen[-3:] == [1, 2, 4]
    assert gate.metric("rejected_total") == rejected + 1
