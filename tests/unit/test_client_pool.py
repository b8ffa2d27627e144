"""The threads under ``FuturesModelClient``: when one is started, what waits, what is refused."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from gpuserve.client.exceptions import ClientClosedError, ClientQueueFullError
from gpuserve.client.futures_client import ResourcePool

TIMEOUT_S = 10.0


class Resources:
    """Numbers, each of which remembers the threads that opened and closed it."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.closed: list[str] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[int]:
        self.opened.append(threading.current_thread().name)
        yield len(self.opened)
        self.closed.append(threading.current_thread().name)


class Gate:
    """A call that says when it has begun, and ends when it is let."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.let = threading.Event()

    def __call__(self, resource: int) -> int:
        self.began.set()
        assert self.let.wait(TIMEOUT_S)
        return resource


@pytest.fixture
def resources() -> Resources:
    return Resources()


def test_what_waits_is_run_in_order_and_more_is_refused(resources: Resources) -> None:
    pool = ResourcePool(resources.open, 1, 2)
    gate, order = Gate(), []
    running = pool.submit(gate, 0)
    waiting = [pool.submit(lambda _, number=number: order.append(number), 0) for number in (1, 2)]
    with pytest.raises(ClientQueueFullError):
        pool.submit(gate, 0)
    begin = time.monotonic()
    with pytest.raises(ClientQueueFullError):
        pool.submit(gate, 0.1)
    assert time.monotonic() - begin >= 0.1
    gate.let.set()
    assert running.result(TIMEOUT_S) == 1
    for one in waiting:
        one.result(TIMEOUT_S)
    assert order == [1, 2]
    pool.close(wait=True)


def test_a_finished_call_takes_no_room(resources: Resources) -> None:
    pool = ResourcePool(resources.open, 1, 1)
    gate, later, submitted = Gate(), [], threading.Event()

    def submit_two(_: object) -> None:
        # in the pool's own thread, which can take no call before this returns
        later.extend(pool.submit(lambda resource: resource, 0) for _ in range(2))
        submitted.set()

    finished = pool.submit(gate, 0)
    finished.add_done_callback(submit_two)
    gate.let.set()
    assert submitted.wait(TIMEOUT_S)
    pool.close(True)
    assert [one.result(TIMEOUT_S) for one in later] == [1, 1]


def test_no_limits(resources: Resources) -> None:
    pool = ResourcePool(resources.open, None, None)
    gates = [Gate() for _ in range(20)]
    futures = [pool.submit(one, 0) for one in gates]
    assert all(one.began.wait(TIMEOUT_S) for one in gates)
    for gate in gates:
        gate.let.set()
    assert len({one.result(TIMEOUT_S) for one in futures}) == 20
    pool.close(wait=True)
    assert len(resources.closed) == 20


def test_whoever_waits_for_room_is_told_that_there_will_be_none(resources: Resources) -> None:
    pool = ResourcePool(resources.open, 1, 1)
    gate = Gate()
    futures = [pool.submit(gate, 0), pool.submit(gate, 0)]
    errors: list[BaseException] = []

    def submit() -> None:
        try:
            pool.submit(gate, TIMEOUT_S)
        except (ClientClosedError, ClientQueueFullError) as error:
            errors.append(error)

    waiting = threading.Thread(target=submit)
    waiting.start()
    pool.close(wait=False)
    waiting.join(TIMEOUT_S)
    assert [type(one) for one in errors] == [ClientClosedError]
    gate.let.set()
    assert [one.result(TIMEOUT_S) for one in futures] == [1, 1]
    pool.close(wait=True)
