"""Batching, deadlines, cancellation and full queues, seen from outside. The models run a batch only when
the test lets them: each reads a byte from a FIFO first (``v2_models.Gate``).
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from conftest import model, tensor, write_config
from processes import wait_until
from serving import GPUSERVE, Addresses, serving
from test_v2_inference import metric
from tritonclient.utils import InferenceServerException

#: name -> (largest batch, more keys of the config)
GATED: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "batching": (4, {"batching": {"max_queue_delay_us": 30_000_000, "preferred_batch_sizes": [4]}}),
    "full": (1, {"queue": {"max_requests": 2, "max_nbytes": 1 << 30}}),
    "full_of_bytes": (1, {"queue": {"max_requests": 100, "max_nbytes": 10_000}}),
    "two": (1, {"instances": [{"device": "cpu", "count": 2}]}),
}
_identities = itertools.count(1)


class Gated:
    """One gated model of a running server."""

    def __init__(self, server: Addresses, name: str, fifo: Path) -> None:
        self.server = server
        self.name = name
        self._fifo = os.open(fifo, os.O_RDWR)

    def close(self) -> None:
        os.close(self._fifo)

    def open_gate(self, batches: int = 1) -> None:
        os.write(self._fifo, b"." * batches)

    def infer(self, identity: int, width: int = 1, **options: Any) -> None:
        """One request of one row; 0 is not gated."""
        with tritonclient.grpc.InferenceServerClient(self.server.grpc) as client:
            client.infer(self.name, [_x(identity, width)], **{"client_timeout": 15.0, **options})

    def seen(self) -> list[int]:
        """The identities that an instance has run, in order (models of one instance)."""
        with tritonclient.grpc.InferenceServerClient(self.server.grpc) as client:
            text = client.infer(self.name, [_x(0, 1)]).as_numpy("seen")[0, 0].decode()
        return [int(one) for one in text.split(",") if one]

    def wait_for(self, queued: int | None = None, running: int | None = None) -> None:
        """Until so many requests wait and run."""
        for gauge, count in (("queue_requests", queued), ("running_requests", running)):
            if count is not None:
                line = f'gpuserve_{gauge}{{model="{self.name}"'
                wait_until(
                    lambda line=line, count=count: metric(self.server, line) == count, f"{count} {gauge}", 10
                )


def _x(identity: int, width: int) -> Any:
    made = tritonclient.grpc.InferInput("x", [1, width], "INT32")
    made.set_data_from_numpy(np.full((1, width), identity, np.int32))
    return made


@pytest.fixture(scope="module", params=["h2corn", "grpcio"])
def gates(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Gated]]:
    """Every gated model, by name."""
    folder = tmp_path_factory.mktemp("gates")
    entries = []
    for name, (size, more) in GATED.items():
        os.mkfifo(folder / name)
        inputs, outputs = [tensor("x", "INT32", -1)], [tensor("seen", "BYTES", 1)]
        kwargs = {"path": str(folder / name)}
        entries.append(model(name, "Gate", inputs, outputs, size, kwargs=kwargs, **more))
    config = write_config(folder, entries, host="127.0.0.1", transport=request.param)
    with serving(GPUSERVE, "serve", str(config)) as server:
        opened = {name: Gated(server, name, folder / name) for name in GATED}
        yield opened
        for gated in opened.values():
            gated.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def ids(count: int) -> list[int]:
    return [next(_identities) for _ in range(count)]


def test_a_queued_request_past_its_deadline_never_runs(
    gates: dict[str, Gated], pool: ThreadPoolExecutor
) -> None:
    single = gates["single"]
    running, by_client, by_parameter = ids(3)
    first = pool.submit(single.infer, running)
    single.wait_for(running=1)
    for late, options in ((by_client, {"client_timeout": 0.3}), (by_parameter, {"timeout": 300_000})):
        started = time.monotonic()
        with pytest.raises(InferenceServerException) as raised:
            single.infer(late, **options)
        assert 0.2 < time.monotonic() - started < 3.0
        assert "Deadline" in str(raised.value) or "timeout expired" in str(raised.value)
    single.wait_for(queued=0)
    single.open_gate()
    first.result()
    seen = single.seen()
    assert running in seen
    assert not {by_client, by_parameter} & set(seen)


def test_a_running_request_past_its_deadline_is_answered_on_time(
    gates: dict[str, Gated], pool: ThreadPoolExecutor
) -> None:
    single = gates["single"]
    started = time.monotonic()
    with pytest.raises(InferenceServerException, match="timeout expired"):
        single.infer(*ids(1), timeout=300_000)
    assert time.monotonic() - started < 3.0
    single.open_gate()
    single.wait_for(running=0)


def test_an_http_timeout_is_a_504(gates: dict[str, Gated]) -> None:
    single = gates["single"]
    entry = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": ids(1)}
    connection = http.client.HTTPConnection(single.server.http, timeout=10)
    body = json.dumps({"inputs": [entry], "parameters": {"timeout": 200_000}})
    connection.request("POST", "/v2/models/single/infer", body)
    answer = connection.getresponse()
    assert answer.status == 504
    assert "single" in json.loads(answer.read())["error"]
    connection.close()
    single.open_gate()
    single.wait_for(running=0)


def test_a_queued_request_whose_client_leaves_never_runs(
    gates: dict[str, Gated], pool: ThreadPoolExecutor
) -> None:
    single = gates["single"]
    running, over_grpc, over_http = ids(3)
    first = pool.submit(single.infer, running)
    single.wait_for(running=1)
    with tritonclient.grpc.InferenceServerClient(single.server.grpc) as client:
        call = client.async_infer("single", [_x(over_grpc, 1)], callback=lambda result, error: None)
        single.wait_for(queued=1)
        call.cancel()
        single.wait_for(queued=0)
    connection = http.client.HTTPConnection(single.server.http, timeout=10)
    entry = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [over_http]}
    connection.request("POST", "/v2/models/single/infer", json.dumps({"inputs": [entry]}))
    single.wait_for(queued=1)
    connection.close()
    single.wait_for(queued=0)
    single.open_gate()
    first.result()
    assert not {over_grpc, over_http} & set(single.seen())


def test_queued_requests_run_in_the_order_they_came(
    gates: dict[str, Gated], pool: ThreadPoolExecutor
) -> None:
    single = gates["single"]
    wanted = ids(5)
    calls = []
    for position, identity in enumerate(wanted):
        calls.append(pool.submit(single.infer, identity))
        single.wait_for(queued=max(0, position), running=1)
    single.open_gate(len(wanted))
    for call in calls:
        call.result()
    assert single.seen()[-5:] == wanted


def test_a_preferred_size_is_not_waited_beyond(gates: dict[str, Gated], pool: ThreadPoolExecutor) -> None:
    batching = gates["batching"]
    calls = [pool.submit(batching.infer, identity) for identity in ids(3)]
    batching.wait_for(queued=3, running=0)  # the delay is half a minute
    calls.append(pool.submit(batching.infer, *ids(1)))
    batching.wait_for(queued=0, running=4)
    batching.open_gate()
    for call in calls:
        call.result()


@pytest.mark.parametrize(("name", "width"), [("full", 1), ("full_of_bytes", 1500)])
def test_a_full_queue_refuses_at_once(
    gates: dict[str, Gated], pool: ThreadPoolExecutor, name: str, width: int
) -> None:
    full = gates[name]
    fits = 2 if name == "full" else 1
    calls = [pool.submit(full.infer, *ids(1), width)]
    full.wait_for(running=1)
    calls += [pool.submit(full.infer, *ids(1), width) for _ in range(fits)]
    full.wait_for(queued=fits)
    with pytest.raises(InferenceServerException, match="Exceeds maximum queue size") as raised:
        full.infer(*ids(1), width)
    assert "UNAVAILABLE" in str(raised.value.status())
    connection = http.client.HTTPConnection(full.server.http, timeout=10)
    entry = {"name": "x", "datatype": "INT32", "shape": [1, width], "data": [1] * width}
    connection.request("POST", f"/v2/models/{name}/infer", json.dumps({"inputs": [entry]}))
    answer = connection.getresponse()
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    answer.read()
    connection.close()
    full.open_gate(1 + fits)
    for call in calls:
        call.result()


def test_a_request_goes_to_whichever_instance_has_room_first(
    gates: dict[str, Gated], pool: ThreadPoolExecutor
) -> None:
    two = gates["two"]
    calls = [pool.submit(two.infer, identity) for identity in ids(3)]
    two.wait_for(running=2, queued=1)
    two.open_gate()  # one of the two instances reads it, and gets the third request
    two.wait_for(running=2, queued=0)
    two.open_gate(2)
    for call in calls:
        call.result()


def test_afterwards_everything_is_accounted_for(gates: dict[str, Gated]) -> None:
    server = gates["single"].server
    wait_until(lambda: metric(server, "gpuserve_running_requests") == 0, "nothing runs", 5)
    assert metric(server, "gpuserve_queue_requests") == 0
    assert metric(server, "gpuserve_arena_blocks") == 0
    assert metric(server, "gpuserve_worker_restarts_total") == 0
    assert metric(server, "gpuserve_request_duration_seconds_count") == metric(
        server, "gpuserve_requests_success_total"
    )
