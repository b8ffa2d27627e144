"""The step loop of a real worker process: each response is that of its step. The test is its front."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from models.stepped import WIDE_AT
from worker_process import WorkerProcess, loaded, model

from gpuserve_worker.protocol import wire

VALUE = ("INT32", (-1,), False)


def buffered(**kwargs: Any) -> wire.Init:
    return model(
        "stepped.py:Buffered",
        decoupled=True,
        max_active=64,
        max_batch_size=0,
        inputs=(("n", "INT32", (1,), False),),
        outputs=(("value", *VALUE),),
        kwargs=kwargs,
    )


class Front:
    """The values of each batch in the order of their arrival, and its end. Credit is given as it is used."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self.values: dict[int, list[int]] = defaultdict(list)
        self.failures: dict[int, wire.WireFailure] = {}
        self.ends: dict[int, wire.Message] = {}

    def start(self, batch_id: int, wanted: int) -> None:
        tensor = wire.WireTensor("n", "INT32", (1,), np.array([wanted], np.int32).tobytes())
        self._worker.link.send(wire.Run(batch_id, (1,), (tensor,)))

    def hear(self) -> None:
        message = self._worker.hear(self._worker.link)
        if isinstance(message, wire.Stepped) and message.batch_ids:
            for batch_id, value in zip(message.batch_ids, _values(message), strict=True):
                assert batch_id not in self.ends
                self.values[batch_id].append(value)
            self._worker.link.send(wire.Credit(tuple([(one, 1) for one in message.batch_ids])))
        elif isinstance(message, wire.Yield):
            ((failure,),) = (wire.responses(message.responses or ()),)
            assert isinstance(failure, wire.WireFailure)
            self.failures[message.batch_id] = failure
        elif isinstance(message, wire.Done | wire.Failed):
            self.ends[message.batch_id] = message


def _values(message: wire.Stepped) -> list[int]:
    if message.outputs is not None:
        return np.frombuffer(wire.tensors(message.outputs)[0].payload, np.int32).tolist()  # type: ignore[arg-type]
    found: list[int] = []
    for one in wire.responses(message.responses or ()):
        assert isinstance(one, tuple)
        found += np.frombuffer(one[0].payload, np.int32).tolist()  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("busy_s", "step_s"), [(0.0, 0.005), (0.002, 0.0), (0.0, 0.0)])
def test_an_array_that_the_next_step_overwrites_is_sent_as_it_was(busy_s: float, step_s: float) -> None:
    """A thread sends the responses while the next step runs, unless the step keeps the interpreter's lock."""
    lengths = {1: 60, 2: 7, 3: 31, 4: 59}
    with loaded(buffered(busy_s=busy_s, step_s=step_s)) as worker:
        front = Front(worker)
        for batch_id, wanted in lengths.items():
            front.start(batch_id, wanted)
        while len(front.ends) < len(lengths):
            front.hear()
    assert {one: list(range(1, n + 1)) for one, n in lengths.items()} == dict(front.values)
    assert all(isinstance(one, wire.Done) for one in front.ends.values())


def test_a_wrong_response_fails_its_request_alone() -> None:
    with loaded(buffered()) as worker:
        front = Front(worker)
        for batch_id, wanted in ((1, WIDE_AT), (2, 20)):
            front.start(batch_id, wanted)
        while len(front.ends) < 2:
            front.hear()
    assert front.values[2] == list(range(1, 21))
    assert front.values[1][:2] == [1, 2]
    assert "FP64" in front.failures[1].text or "float64" in front.failures[1].text
    assert isinstance(front.ends[1], wire.Failed)
