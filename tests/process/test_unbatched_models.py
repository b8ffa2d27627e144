"""Models without batching: several requests travel together; each has its own answer and failure."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from operated import MODELS, TIMEOUT_S, OperatedServer, Orders, config
from worker_process import WorkerProcess, floats, loaded, output
from worker_process import model as init

from gpuserve_worker.protocol import datagram, wire
from gpuserve_worker.protocol.datagram import joined

POISON = -13.0


def entry(callable_: str, **keys: Any) -> dict[str, Any]:
    return {
        "name": "m",
        "callable": f"{MODELS / 'one_by_one.py'}:{callable_}",
        "inputs": [{"name": "x", "dtype": "float32", "shape": [1]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [1]}],
        "max_batch_size": 0,
        "prefetch": 16,
        **keys,
    }


class Asking:
    """Requests at once through tritonclient; ``answers`` has the outputs or errors of each value."""

    def __init__(self, server: OperatedServer) -> None:
        self._client = grpcclient.InferenceServerClient(server.addresses["gRPC"])
        self._came: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
        self.answers: dict[float, list[Any]] = {}

    def ask(self, *values: float) -> None:
        for value in values:
            tensor = grpcclient.InferInput("x", [1], "FP32")
            tensor.set_data_from_numpy(np.array([value], np.float32))
            self._client.async_infer("m", [tensor], self._taking(value))

    def _taking(self, value: float) -> Callable[[Any, Any], None]:
        return lambda result, error: self._came.put((value, result, error))

    def take(self, count: int) -> None:
        for _ in range(count):
            value, result, error = self._came.get(timeout=TIMEOUT_S)
            answer = error if result is None else float(result.as_numpy("y")[0])
            self.answers.setdefault(value, []).append(answer)

    def close(self) -> None:
        self._client.close()
        assert self._came.empty()


def serving(tmp_path: Path, model: dict[str, Any]) -> OperatedServer:
    return OperatedServer(config(tmp_path, model))


def test_every_request_of_many_at_once_gets_its_own_answer(tmp_path: Path) -> None:
    with serving(tmp_path, entry("doubled")) as server:
        asking = Asking(server.wait_ready())
        for first in range(0, 1024, 128):
            asking.ask(*range(first, first + 128))
            asking.take(128)
        asking.close()
        assert asking.answers == {n: [2.0 * n] for n in range(1024)}


def test_a_slow_model_answers_each_request_as_it_ends(tmp_path: Path) -> None:
    with serving(tmp_path, entry("slow")) as server:
        asking = Asking(server.wait_ready())
        asking.ask(0)
        asking.take(1)
        began, times = time.monotonic(), []
        asking.ask(1, 2, 3, 4)
        for _ in range(4):
            asking.take(1)
            times.append(time.monotonic() - began)
        asking.close()
        for number, took in enumerate(times, 1):
            assert took >= 0.05 * number
        # Together they would all be as late as the last one.
        assert times[0] < times[3] - 0.1
        assert times[1] < times[3] - 0.05


@pytest.mark.parametrize("retry", [True, False])
def test_only_what_kills_the_worker_is_lost_and_nothing_is_answered_twice(
    tmp_path: Path, retry: bool
) -> None:
    orders = Orders(tmp_path / "orders")
    keys = {"kwargs": {"directory": str(orders.directory)}, "retry_on_worker_death": retry}
    with serving(tmp_path, entry("Noted", **keys)) as server:
        asking = Asking(server.wait_ready())
        asking.ask(*range(100))  # so that it is known to be short
        asking.take(100)
        asking.ask(*range(100, 130), POISON, *range(130, 160))
        asking.take(61)
        asking.close()
        poisoned = asking.answers.pop(POISON)
        assert len(poisoned) == 1
        assert "the worker process died" in str(poisoned[0])
        assert asking.answers == {n: [2.0 * n] for n in range(160)}
        begun = Counter(map(float, (orders.directory / "journal").read_text().split()))
        assert begun.pop(POISON) == 1 + retry
        assert max(begun.values()) <= 1 + retry


# ---- the worker by itself -------------------------------------------------------------------


def send(worker: WorkerProcess, *messages: wire.Message) -> None:
    worker.link_socket.send(joined([wire.WORKER.encode(one) for one in messages]))


def one(batch_id: int, value: float, *, may_wait: bool = True) -> wire.Run:
    tensor = floats("x", [value])._replace(shape=(1,))
    return wire.Run(batch_id, (1,), (tensor,), may_wait=may_wait)


def worker_of(callable_: str, **changes: Any) -> wire.Init:
    return init(f"one_by_one.py:{callable_}", max_batch_size=0, **changes)


def test_a_worker_answers_every_batch_of_a_datagram_in_order() -> None:
    with loaded(worker_of("doubled")) as worker:
        send(worker, *[one(n, n) for n in range(300)])
        for n in range(300):
            done = worker.answer()
            assert (done.batch_id, output(worker, done).tolist()) == (n, [2.0 * n])


def test_an_answer_waits_for_no_slow_call() -> None:
    with loaded(worker_of("slow")) as worker:
        send(worker, *[one(n, n) for n in range(3)])
        heard = []
        for _ in range(3):
            data, _ = datagram.receive(worker.link_socket, datagram.receive_buffer())
            heard.append([message.batch_id for message in wire.WORKER.decode_all(data)])
        assert heard == [[0], [1], [2]]


def test_answers_that_may_not_wait_leave_before_the_next_call() -> None:
    with loaded(worker_of("doubled")) as worker:
        send(worker, *[one(n, n, may_wait=False) for n in range(20)])
        for n in range(20):
            data, _ = datagram.receive(worker.link_socket, datagram.receive_buffer())
            assert [message.batch_id for message in wire.WORKER.decode_all(data)] == [n]


def test_what_waits_leaves_before_a_batch_that_may_kill(tmp_path: Path) -> None:
    with loaded(worker_of("Noted", kwargs={"directory": str(tmp_path)})) as worker:
        send(worker, *[one(n, n) for n in range(10)], one(10, POISON, may_wait=False))
        assert [worker.answer().batch_id for _ in range(10)] == list(range(10))
        assert worker.hear(worker.link) is None


def test_a_request_that_is_called_off_while_it_waits_does_not_run(tmp_path: Path) -> None:
    with loaded(worker_of("slow")) as worker:
        send(worker, *[one(n, n) for n in range(4)])
        send(worker, wire.Cancel(2, 0))
        heard = {message.batch_id: type(message) for message in [worker.answer() for _ in range(4)]}
        assert heard == {0: wire.Done, 1: wire.Done, 2: wire.Failed, 3: wire.Done}
