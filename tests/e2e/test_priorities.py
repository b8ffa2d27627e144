"""Priorities and queue policies of bound models, over both protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from bound import InBackground, Refused, free_server
from bound import infer as infer_http
from gated import Gate, grpc_input
from tritonclient.utils import InferenceServerException

from gpuserve import DynamicBatcher
from gpuserve.model.declaration import QueuePolicy, TimeoutAction

MINUTE_US = 60_000_000
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


def by_http(gate: Gate, number: int, parameters: dict[str, int]) -> None:
    infer_http(gate.server, gate.name, parameters, INPUT_1=np.full((1, 1), number, np.int32))


def by_grpc(gate: Gate, number: int, parameters: dict[str, int]) -> None:
    with gate.grpc() as client:
        client.infer(gate.name, [grpc_input(number)], **parameters)


@pytest.fixture(scope="module")
def gates() -> Iterator[dict[str, Gate]]:
    with free_server() as server:
        made = {name: Gate(server, name, batcher=batcher) for name, batcher in BATCHERS.items()}
        server.run()
        yield made
        for gate in made.values():
            gate.let(100)  # after a failure something may still run


Send = Callable[..., InBackground]


@pytest.fixture(params=[by_http, by_grpc])
def send(request: pytest.FixtureRequest) -> Send:
    """Ask a gate, by one of the protocols."""
    return lambda gate, number, **parameters: gate.send(request.param, number, parameters)


def refusal(asked: InBackground) -> tuple[str, str]:
    """The code of an error, and its text."""
    with pytest.raises((Refused, InferenceServerException)) as raised:
        asked.result()
    error = raised.value
    if isinstance(error, Refused):
        return {503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}[error.status], error.text
    assert isinstance(error, InferenceServerException)
    return error.status().removeprefix("StatusCode."), error.message()


def test_higher_levels_run_first(gates: dict[str, Gate], send: Send) -> None:
    gate = gates["levels"]
    calls = [send(gate, 100)]
    for number, priority in enumerate((3, 0, 1, 99, 2, 1)):
        calls.append(send(gate, number, **({"priority": priority} if priority else {})))
    gate.let(len(calls))
    for call in calls:
        call.result()
    assert gate.seen[-7:] == [100, 2, 5, 1, 3, 4, 0]


def test_a_request_that_waited_too_long_is_rejected_and_never_runs(
    gates: dict[str, Gate], send: Send
) -> None:
    gate = gates["hasty"]
    failed = gate.metric("requests_failure_total")
    running = send(gate, 1)
    late = send(gate, 2)
    assert refusal(late) == (
        "UNAVAILABLE",
        "Request timeout expired",
    )
    gate.let(1)
    running.result()
    assert gate.seen[-1] == 1
    assert gate.metric("requests_failure_total") == failed + 1
    assert gate.metric("arena_blocks") == 0


def test_a_client_may_shorten_its_time_where_the_policy_lets_it(gates: dict[str, Gate], send: Send) -> None:
    gate = gates["shortened"]
    running = send(gate, 1)
    late = send(gate, 2, timeout=100_000)
    assert refusal(late) == (
        "UNAVAILABLE",
        "Request timeout expired",
    )
    gate.let(1)
    running.result()
    assert gate.seen[-1] == 1


def test_a_delayed_request_runs_after_the_others_and_is_not_refused(
    gates: dict[str, Gate], send: Send
) -> None:
    gate = gates["patient"]
    calls = [send(gate, 1), send(gate, 2, timeout=1), send(gate, 3)]
    gate.let(len(calls))
    for call in calls:
        call.result()
    assert gate.seen[-3:] == [1, 3, 2]


def test_a_full_level_refuses_and_the_others_do_not(gates: dict[str, Gate], send: Send) -> None:
    gate = gates["narrow"]
    rejected = gate.metric("rejected_total")
    calls = [send(gate, 1), send(gate, 2, priority=1)]
    full = send(gate, 3, priority=1)
    assert refusal(full) == ("UNAVAILABLE", "Exceeds maximum queue size of 1 requests of priority 1")
    calls.append(send(gate, 4))
    gate.let(len(calls))
    for call in calls:
        call.result()
    assert gate.seen[-3:] == [1, 2, 4]
    assert gate.metric("rejected_total") == rejected + 1
