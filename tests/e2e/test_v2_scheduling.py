"""Batching, deadlines, cancellation and full queues, seen from outside. The models run a batch only when
the test lets them: each reads a byte from a FIFO first (``v2_models.Gate``).
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from config_file import model, served, tensor
from processes import wait_until
from serving import Addresses
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 15.0
#: What is late by less than this is on time: the machine may be busy.
ON_TIME_S = 10.0
DELAY_S = 0.5
#: name -> (largest batch, more keys of the config)
GATED: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "preferred": (8, {"batching": {"max_queue_delay_us": 30_000_000, "preferred_batch_sizes": [4]}}),
    "delayed": (8, {"batching": {"max_queue_delay_us": int(DELAY_S * 1e6)}}),
    "full": (1, {"queue": {"max_requests": 2, "max_nbytes": 1 << 30}}),
    "full_of_bytes": (1, {"queue": {"max_requests": 100, "max_nbytes": 10_000}}),
    "two": (1, {"instances": [{"device": "cpu", "count": 2}]}),
}
#: What becomes of a request; each counts it once.
FATES = ("requests_success_total", "requests_failure_total", "cancelled_total", "rejected_total")
_identities = itertools.count(1)


class Gated:
    """One gated model of a running server."""

    def __init__(self, server: Addresses, name: str, fifo: Path) -> None:
        self.server = server
        self.name = name
        #: The identities of all requests that were sent.
        self.sent: list[int] = []
        self._fifo = os.open(fifo, os.O_RDWR)

    def close(self) -> None:
        os.close(self._fifo)

    def open_gate(self, batches: int = 1) -> None:
        os.write(self._fifo, b"." * batches)

    def infer(self, identity: int, width: int = 1, **options: Any) -> None:
        """One request of one row over gRPC; 0 is not gated."""
        with tritonclient.grpc.InferenceServerClient(self.server.grpc) as client:
            client.infer(self.name, [self.x(identity, width)], **{"client_timeout": TIMEOUT_S, **options})

    def x(self, identity: int, width: int = 1) -> Any:
        """The input of a request that is about to be sent."""
        self.sent.append(identity)
        made = tritonclient.grpc.InferInput("x", [1, width], "INT32")
        made.set_data_from_numpy(np.full((1, width), identity, np.int32))
        return made

    @contextlib.contextmanager
    def http(self) -> Iterator[http.client.HTTPConnection]:
        with contextlib.closing(http.client.HTTPConnection(self.server.http, timeout=TIMEOUT_S)) as made:
            yield made

    def post(self, connection: http.client.HTTPConnection, identity: int, width: int = 1, **how: Any) -> None:
        """Send one request of one row over HTTP; ``how`` are its parameters."""
        self.sent.append(identity)
        entry = {"name": "x", "datatype": "INT32", "shape": [1, width], "data": [identity] * width}
        body = json.dumps({"inputs": [entry], "parameters": how})
        connection.request("POST", f"/v2/models/{self.name}/infer", body)

    def seen(self) -> list[int]:
        """The identities that an instance has run, in order (models of one instance)."""
        with tritonclient.grpc.InferenceServerClient(self.server.grpc) as client:
            text = client.infer(self.name, [self.x(0)]).as_numpy("seen")[0, 0].decode()
        return [int(one) for one in text.split(",") if one]

    def samples(self, name: str) -> list[float]:
        """A metric's values for this model, one for each instance, code or reason."""
        with urllib.request.urlopen(f"http://{self.server.metrics}/metrics", timeout=TIMEOUT_S) as page:
            lines = page.read().decode().splitlines()
        start, label = f"gpuserve_{name}{{", f'model="{self.name}"'
        return [float(one.rsplit(" ", 1)[1]) for one in lines if one.startswith(start) and label in one]

    def metric(self, *names: str) -> float:
        return sum(sum(self.samples(name)) for name in names)

    def wait_for(self, **gauges: int) -> None:
        """Until so many requests are ``queued`` and ``running``."""
        names = {"queued": "queue_requests", "running": "running_requests"}
        for gauge, count in gauges.items():
            name = names[gauge]
            wait_until(lambda name=name, count=count: self.metric(name) == count, f"{count} {gauge}")


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Gated]]:
    """Every gated model, by name."""
    folder = tmp_path_factory.mktemp("gates")
    entries = []
    for name, (size, more) in GATED.items():
        os.mkfifo(folder / name)
        inputs, outputs = [tensor("x", "INT32", -1)], [tensor("seen", "BYTES", 1)]
        kwargs = {"path": str(folder / name)}
        entries.append(model(name, "Gate", inputs, outputs, size, kwargs=kwargs, **more))
    with served(folder, entries) as server, contextlib.ExitStack() as opened:
        yield {name: opened.enter_context(_gated(server, name, folder / name)) for name in GATED}


@contextlib.contextmanager
def _gated(server: Addresses, name: str, fifo: Path) -> Iterator[Gated]:
    with contextlib.closing(Gated(server, name, fifo)) as gated:
        yield gated
        gated.open_gate(100)  # after a failure something may still run, and the server is to end


@pytest.fixture
def single(gates: dict[str, Gated]) -> Gated:
    return gates["single"]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def ids(count: int) -> list[int]:
    return [next(_identities) for _ in range(count)]


@contextlib.contextmanager
def busy(gated: Gated, pool: ThreadPoolExecutor) -> Iterator[None]:
    """One request runs inside the block, and is let go and answered at its end."""
    running = pool.submit(gated.infer, *ids(1))
    gated.wait_for(running=1)
    yield
    gated.open_gate()
    running.result()
    gated.wait_for(running=0)


# ---- deadlines ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"client_timeout": 0.3}, {"timeout": 300_000}])
def test_a_queued_grpc_request_past_its_deadline_never_runs(
    single: Gated, pool: ThreadPoolExecutor, options: dict[str, Any]
) -> None:
    (late,) = ids(1)
    with busy(single, pool):
        started = time.monotonic()
        with pytest.raises(InferenceServerException) as raised:
            single.infer(late, **options)
        assert 0.25 < time.monotonic() - started < 0.3 + ON_TIME_S
        assert "DEADLINE_EXCEEDED" in str(raised.value.status()), raised.value
        single.wait_for(queued=0, running=1)
    assert late not in single.seen()


def test_a_queued_http_request_past_its_deadline_never_runs(single: Gated, pool: ThreadPoolExecutor) -> None:
    (late,) = ids(1)
    with busy(single, pool), single.http() as connection:
        started = time.monotonic()
        single.post(connection, late, timeout=300_000)
        answer = connection.getresponse()
        assert 0.3 <= time.monotonic() - started < 0.3 + ON_TIME_S
        assert answer.status == 504
        text = json.loads(answer.read())["error"]
        assert text == (
            "Deadline Exceeded: 0.3 s were given to model 'single', and the request was still queued"
        )
        single.wait_for(queued=0, running=1)
    assert late not in single.seen()


@pytest.mark.parametrize("options", [{"client_timeout": 0.3}, {"timeout": 300_000}])
def test_a_running_grpc_request_past_its_deadline_is_answered_on_time(
    single: Gated, options: dict[str, Any]
) -> None:
    given_up = single.metric("requests_failure_total", "cancelled_total")
    started = time.monotonic()
    with pytest.raises(InferenceServerException) as raised:
        single.infer(*ids(1), **options)
    assert 0.25 < time.monotonic() - started < 0.3 + ON_TIME_S
    assert "DEADLINE_EXCEEDED" in str(raised.value.status()), raised.value
    wait_until(
        lambda: single.metric("requests_failure_total", "cancelled_total") == given_up + 1,
        "the server gives it up before it has run",
    )
    single.wait_for(running=1)
    single.open_gate()
    single.wait_for(running=0)


def test_a_running_http_request_past_its_deadline_is_answered_on_time(single: Gated) -> None:
    with single.http() as connection:
        single.post(connection, *ids(1), timeout=200_000)
        answer = connection.getresponse()
        assert answer.status == 504
        assert "'single', and the request was still running" in json.loads(answer.read())["error"]
    single.open_gate()
    single.wait_for(running=0)


# ---- clients that leave ---------------------------------------------------------------------


def test_a_queued_grpc_call_that_is_cancelled_never_runs(single: Gated, pool: ThreadPoolExecutor) -> None:
    (left,) = ids(1)
    cancelled = single.metric("cancelled_total")
    with busy(single, pool):
        with tritonclient.grpc.InferenceServerClient(single.server.grpc) as client:
            call = client.async_infer("single", [single.x(left)], callback=lambda result, error: None)
            single.wait_for(queued=1)
            call.cancel()
            single.wait_for(queued=0, running=1)
        assert single.metric("cancelled_total") == cancelled + 1
    assert left not in single.seen()


def test_a_queued_request_of_a_closed_http_connection_never_runs(
    single: Gated, pool: ThreadPoolExecutor
) -> None:
    (left,) = ids(1)
    cancelled = single.metric("cancelled_total")
    with busy(single, pool):
        with single.http() as connection:
            single.post(connection, left)
            single.wait_for(queued=1)
        single.wait_for(queued=0, running=1)
        assert single.metric("cancelled_total") == cancelled + 1
    assert left not in single.seen()


def test_a_call_that_is_cancelled_while_it_runs_gives_its_slot_back(single: Gated) -> None:
    cancelled = single.metric("cancelled_total")
    with tritonclient.grpc.InferenceServerClient(single.server.grpc) as client:
        call = client.async_infer("single", [single.x(*ids(1))], callback=lambda result, error: None)
        single.wait_for(running=1)
        call.cancel()
        wait_until(lambda: single.metric("cancelled_total") == cancelled + 1, "it is cancelled")
    single.open_gate()
    single.wait_for(running=0)
    single.open_gate()
    single.infer(*ids(1))


# ---- full queues ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "width", "fits"), [("full", 1, 2), ("full_of_bytes", 1500, 1)])
def test_a_full_queue_refuses_at_once(
    gates: dict[str, Gated], single: Gated, pool: ThreadPoolExecutor, name: str, width: int, fits: int
) -> None:
    full = gates[name]
    with busy(full, pool):
        waiting = [pool.submit(full.infer, *ids(1), width) for _ in range(fits)]
        full.wait_for(queued=fits)
        with pytest.raises(InferenceServerException, match="Exceeds maximum queue size") as raised:
            full.infer(*ids(1), width)
        assert "UNAVAILABLE" in str(raised.value.status())
        with full.http() as connection:
            full.post(connection, *ids(1), width)
            answer = connection.getresponse()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert "Exceeds maximum queue size" in json.loads(answer.read())["error"]
        assert full.metric("rejected_total") == 2
        single.seen()  # other models have queues of their own
        full.open_gate(fits)
    for call in waiting:
        call.result()
    full.open_gate()
    full.infer(*ids(1), width)


# ---- batches, order, instances --------------------------------------------------------------


def test_a_request_waits_for_others_no_longer_than_the_delay(
    gates: dict[str, Gated], pool: ThreadPoolExecutor
) -> None:
    delayed = gates["delayed"]
    started = time.monotonic()
    calls = [pool.submit(delayed.infer, identity) for identity in ids(2)]
    delayed.wait_for(running=2)
    assert DELAY_S <= time.monotonic() - started < DELAY_S + ON_TIME_S
    delayed.open_gate()
    for call in calls:
        call.result()
    assert (delayed.metric("batch_size_count"), delayed.metric("batch_size_sum")) == (1, 2)


def test_a_preferred_size_is_not_waited_beyond(gates: dict[str, Gated], pool: ThreadPoolExecutor) -> None:
    preferred = gates["preferred"]
    calls = [pool.submit(preferred.infer, identity) for identity in ids(3)]
    preferred.wait_for(queued=3, running=0)  # the delay is half a minute
    calls.append(pool.submit(preferred.infer, *ids(1)))
    preferred.wait_for(queued=0, running=4)
    preferred.open_gate()
    for call in calls:
        call.result()
    assert (preferred.metric("batch_size_count"), preferred.metric("batch_size_sum")) == (1, 4)


def test_queued_requests_run_in_the_order_they_came(single: Gated, pool: ThreadPoolExecutor) -> None:
    wanted = ids(5)
    calls = []
    for position, identity in enumerate(wanted):
        calls.append(pool.submit(single.infer, identity))
        single.wait_for(running=1, queued=position)
    single.open_gate(len(wanted))
    for call in calls:
        call.result()
    assert single.seen()[-5:] == wanted


def test_a_request_goes_to_whichever_instance_has_room_first(
    gates: dict[str, Gated], pool: ThreadPoolExecutor
) -> None:
    two = gates["two"]
    calls = [pool.submit(two.infer, identity) for identity in ids(3)]
    two.wait_for(running=2, queued=1)
    assert two.samples("saturation") == [1.5]
    two.open_gate()  # one of the two instances reads it, and gets the third request
    two.wait_for(queued=0, running=2)
    two.open_gate(2)
    for call in calls:
        call.result()
    assert sorted(two.samples("batch_size_count")) == [1, 2]


# ---- callables that raise, connections that stay --------------------------------------------


def test_what_the_callable_raises_reaches_its_own_batch_only(single: Gated, pool: ThreadPoolExecutor) -> None:
    before, wrong, after = ids(3)
    calls = []
    for position, identity in enumerate((before, -wrong, after)):
        calls.append(pool.submit(single.infer, identity))
        single.wait_for(running=1, queued=position)
    single.open_gate(3)
    calls[0].result()
    with pytest.raises(InferenceServerException) as raised:
        calls[1].result()
    calls[2].result()
    assert "INTERNAL" in str(raised.value.status())
    assert raised.value.message() == f"-{wrong} is negative, says v2_models.py"
    with single.http() as connection:
        single.post(connection, -wrong)
        single.open_gate()
        answer = connection.getresponse()
        assert answer.status == 500
        assert json.loads(answer.read()) == {"error": f"-{wrong} is negative, says v2_models.py"}


def test_connections_stay_open(single: Gated) -> None:
    with single.http() as connection:
        connection.connect()
        kept = connection.sock
        for _ in range(200):
            single.post(connection, 0)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            assert connection.sock is kept
    with tritonclient.grpc.InferenceServerClient(single.server.grpc) as client:
        for _ in range(200):
            answer = client.infer("single", [single.x(0)], client_timeout=TIMEOUT_S)
            assert answer.as_numpy("seen").shape == (1, 1)


def test_afterwards_everything_is_accounted_for(gates: dict[str, Gated]) -> None:
    for gated in gates.values():
        gated.wait_for(queued=0, running=0)
        assert gated.samples("saturation") == [0.0]
        assert gated.metric(*FATES) == len(gated.sent)
        assert gated.metric("request_duration_seconds_count") == gated.metric("requests_success_total")
        # Every request has one row: those that left the queue are the rows of all instances' batches.
        assert gated.metric("batch_size_sum") == gated.metric("queue_duration_seconds_count")
        assert gated.metric("batch_size_count") == gated.metric("compute_duration_seconds_count")
        assert gated.metric("arena_blocks") == 0
        assert set(gated.samples("worker_up")) == {1}
        assert set(gated.samples("worker_restarts_total")) == {0}
