"""Shares of the event loop: what a flood of requests for one model leaves to others."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest
from driver_scene import SPEC, Scene
from http2_peer import POST, Peer, frame
from http2_scene import RecordingWay
from http2_scene import Talk as Http2Talk

from gpuserve.front.models.batch_runner import AnswerTurns
from gpuserve.front.requests.inference import InferResponse
from gpuserve.model.spec import QueueSpec
from gpuserve_worker.protocol.tensor import TensorSpec

ONE = dataclasses.replace(SPEC, instances=SPEC.instances[:1], max_batch_size=64, queue=QueueSpec(200))


@pytest.mark.parametrize("closes", [False, True], ids=["in turns", "closed meanwhile"])
async def test_the_answers_of_a_busy_model_are_delivered_in_portions(closes: bool) -> None:
    """While a second batch runs, so that the worker does not wait for the clients."""
    answered: list[int] = []
    scene = Scene(ONE, direct=True)
    await scene.settle()
    for value in range(192):
        scene.submit(1, float(value), None)
    await scene.settle()
    (worker,) = scene.workers
    worker.answer([True])
    for _ in range(8):
        answered.append(len(scene.answers))
        if closes and answered[-1]:
            scene.driver.close()
            assert len(scene.answers) == 192
            break
        await asyncio.sleep(0)
    else:
        scene.driver.close()
    worker.die()
    assert max(after - before for before, after in itertools.pairwise(answered)) == 16
    assert closes or answered[-1] == 64


def test_answers_come_in_smaller_portions_while_clients_use_several_models() -> None:
    turns = AnswerTurns()
    sent = [("a", 1.0), ("a", 1.3), ("b", 1.4), ("a", 1.45), ("a", 1.5), ("a", 1.56)]
    assert [turns.portion(model, sent_at) for model, sent_at in sent] == [16, 16, 4, 4, 4, 16]


@pytest.mark.parametrize(("nbytes", "most"), [(64 << 10, 8), (1 << 20, 1)])
async def test_large_answers_leave_one_after_the_other(nbytes: int, most: int) -> None:
    answered: list[int] = []
    spec = dataclasses.replace(ONE, outputs=(TensorSpec("y", "FP32", (-1,)),))
    scene = Scene(spec, direct=True)
    await scene.settle()
    for value in range(12):
        scene.submit(1, float(value), None)
    await scene.settle()
    (worker,) = scene.workers
    worker.answer_at_length(nbytes)
    for _ in range(20):
        answered.append(len(scene.answers))
        await asyncio.sleep(0)
    for (answer,) in scene.answers.values():
        assert isinstance(answer, InferResponse)
        answer.close()
    scene.driver.close()
    worker.die()
    assert max(after - before for before, after in itertools.pairwise(answered)) == most
    assert answered[-1] == 12


@pytest.mark.parametrize(("open_streams", "at_once"), [(4, 8), (8, 1)])
def test_a_connection_with_many_requests_lets_others_go_first(open_streams: int, at_once: int) -> None:
    """Once the budget of an iteration is spent."""
    peer, way = Peer(), RecordingWay()
    talk = Http2Talk(None, peer=peer, way=way)
    block, again = peer.encoder.encode(POST), peer.encoder.encode(POST)
    streams = range(1, 2 * open_streams, 2)
    talk.http2.feed(b"".join(frame(1, 4, one, block if one == 1 else again) for one in streams))
    before, way.hurried = len(talk.sinks), True
    first = 2 * open_streams + 1
    requests = [frame(1, 4, first + 2 * n, again) + frame(0, 1, first + 2 * n, b"x") for n in range(9)]
    talk.http2.feed(b"".join(requests))
    assert before == open_streams
    assert len(talk.sinks) - before == at_once
    assert way.waits
