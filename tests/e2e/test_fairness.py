"""Clients of one model who take turns, over both protocols and in streams."""

from __future__ import annotations

import http.client
import json
import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bound import InBackground, Refused, free_server
from gated import Gate, grpc_input

from gpuserve.model import Queue

TENANTS = Queue(fairness="client", fairness_header="X-Tenant")
#: One for each test: nothing is given to an instance early whose batches nobody has seen.
QUEUES = {
    "by_http": TENANTS,
    "by_grpc": TENANTS,
    "by_stream": TENANTS,
    "addresses": Queue(fairness="client"),
    "narrow": Queue(fairness="client", fairness_header="x-tenant", max_requests=3),
}


def by_http(model: Gate, client: str, number: int) -> None:
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


def by_grpc(model: Gate, client: str, number: int) -> None:
    with model.grpc() as channel:
        channel.infer(model.name, [grpc_input(number)], headers={"x-tenant": client})


def by_stream(model: Gate, client: str, number: int) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with model.grpc() as channel:
        channel.start_stream(lambda result, error: answers.put(error), headers={"x-tenant": client})
        channel.async_stream_infer(model.name, [grpc_input(number)])
        assert answers.get(timeout=30) is None


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Gate]]:
    with free_server() as server:
        made = {name: Gate(server, name, queue=its) for name, its in QUEUES.items()}
        server.run()
        yield made


@pytest.mark.parametrize("how", [by_http, by_grpc, by_stream])
def test_clients_that_a_header_names_take_turns(models: dict[str, Gate], how: Callable[..., None]) -> None:
    model = models[how.__name__]
    asked = [model.send(how, "loud", number) for number in range(5)]
    asked += [model.send(how, "quiet", number) for number in (10, 11)]
    model.let(7)
    for one in asked:
        one.result()
    assert model.seen == [0, 1, 10, 2, 11, 3, 4]


def test_clients_are_told_apart_by_their_addresses(models: dict[str, Gate]) -> None:
    model = models["addresses"]
    asked = [model.send(by_http, "127.0.0.1", number) for number in range(4)]
    asked += [model.send(by_http, "127.0.0.2", number) for number in (10, 11)]
    model.let(6)
    for one in asked:
        one.result()
    assert model.seen == [0, 1, 10, 2, 11, 3]


def test_a_full_queue_lets_a_quiet_client_in(models: dict[str, Gate]) -> None:
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
