"""Clients of one model who take turns, over both protocols and in streams. The model runs one request at a
time, when the test lets it.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from bound import InBackground, Refused, free_server
from processes import wait_until

from gpuserve import ModelConfig, Server, Tensor
from gpuserve.decorators import batch
from gpuserve.model import Queue

NUMBER = Tensor((1,), np.int32)
TENANTS = Queue(fairness="client", fairness_header="X-Tenant")
#: One for each test: nothing is given to an instance early whose batches nobody has seen.
QUEUES = {
    "by_http": TENANTS,
    "by_grpc": TENANTS,
    "by_stream": TENANTS,
    "addresses": Queue(fairness="client"),
    "narrow": Queue(fairness="client", fairness_header="x-tenant", max_requests=3),
}


class Model:
    """It remembers what it runs, and ends a run when it is let."""

    def __init__(self, server: Server, name: str) -> None:
        self.name = name
        self.seen: list[int] = []
        self.server = server
        self._let = threading.Semaphore(0)
        config = ModelConfig(max_batch_size=1, queue=QUEUES[name])
        server.bind(name, self._run, [NUMBER], [NUMBER], config=config, isolation="thread")

    @batch
    def _run(self, INPUT_1: Any) -> Any:
        self.seen.append(int(INPUT_1[0, 0]))
        assert self._let.acquire(timeout=30)
        return [INPUT_1]

    def let(self, count: int) -> None:
        self._let.release(count)

    def send(self, how: Callable[..., None], client: str, number: int) -> InBackground:
        """A request that is running or queued when this returns."""
        before = self.accepted()
        asked = InBackground(how, self, client, number)
        wait_until(lambda: self.accepted() > before, f"{number} is there")
        return asked

    def accepted(self) -> float:
        """How many requests wait, run or have come to an end."""
        with urllib.request.urlopen(self.server.addresses["metrics"], timeout=10) as page:
            lines = page.read().decode().splitlines()
        names = "queue_requests", "running_requests", "requests_success_total", "requests_failure_total"
        starts, label = tuple(f"gpuserve_{name}{{" for name in names), f'model="{self.name}"'
        return sum(float(one.rsplit(" ", 1)[1]) for one in lines if one.startswith(starts) and label in one)


def by_http(model: Model, client: str, number: int) -> None:
    """A POST; a client that is an address connects from there."""
    is_address = client.startswith("127.")
    headers = {} if is_address else {"X-Tenant": client}
    port = model.server.addresses["http"].rpartition(":")[2]
    source = (client, 0) if is_address else None
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30, source_address=source)
    inputs = [{"name": "INPUT_1", "datatype": "INT32", "shape": [1, 1], "data": [number]}]
    connection.request(
        "POST", f"/v2/models/{model.name}/infer", json.dumps({"inputs": inputs}), headers=headers
    )
    answer = connection.getresponse()
    body = json.load(answer)
    connection.close()
    if answer.status != 200:
        raise Refused(answer.status, body["error"])


def _grpc_input(number: int) -> Any:
    sent = tritonclient.grpc.InferInput("INPUT_1", [1, 1], "INT32")
    sent.set_data_from_numpy(np.full((1, 1), number, np.int32))
    return sent


def by_grpc(model: Model, client: str, number: int) -> None:
    address = model.server.addresses["grpc"].rpartition("/")[2]
    with tritonclient.grpc.InferenceServerClient(address) as channel:
        channel.infer(model.name, [_grpc_input(number)], headers={"x-tenant": client})


def by_stream(model: Model, client: str, number: int) -> None:
    address = model.server.addresses["grpc"].rpartition("/")[2]
    answers: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(address) as channel:
        channel.start_stream(lambda result, error: answers.put(error), headers={"x-tenant": client})
        channel.async_stream_infer(model.name, [_grpc_input(number)])
        assert answers.get(timeout=30) is None


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Model]]:
    server = free_server()
    made = {name: Model(server, name) for name in QUEUES}
    server.run()
    try:
        yield made
    finally:
        server.stop()


@pytest.mark.parametrize("how", [by_http, by_grpc, by_stream])
def test_clients_that_a_header_names_take_turns(models: dict[str, Model], how: Callable[..., None]) -> None:
    model = models[how.__name__]
    asked = [model.send(how, "loud", number) for number in range(5)]
    asked += [model.send(how, "quiet", number) for number in (10, 11)]
    model.let(7)
    for one in asked:
        one.result()
    assert model.seen == [0, 1, 10, 2, 11, 3, 4]


def test_clients_are_told_apart_by_their_addresses(models: dict[str, Model]) -> None:
    model = models["addresses"]
    asked = [model.send(by_http, "127.0.0.1", number) for number in range(4)]
    asked += [model.send(by_http, "127.0.0.2", number) for number in (10, 11)]
    model.let(6)
    for one in asked:
        one.result()
    assert model.seen == [0, 1, 10, 2, 11, 3]


def test_a_full_queue_lets_a_quiet_client_in(models: dict[str, Model]) -> None:
    model = models["narrow"]
    asked = [model.send(by_http, "loud", number) for number in range(4)]
    with pytest.raises(Refused, match="Exceeds maximum queue size of 3 requests"):
        by_http(model, "loud", 4)
    quiet = InBackground(by_http, model, "quiet", 10)
    with pytest.raises(Refused, match="of which this client had the most") as refused:
        asked.pop().result()
    assert refused.value.status == 503
    model.let(4)
    for one in (*asked, quiet):
        one.result()
    assert model.seen == [0, 1, 10, 2]
