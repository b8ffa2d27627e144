"""A stream's first responses leave the front before its worker sends more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from driver_scene import SPEC, Scene, Worker

from gpuserve_worker.protocol import wire

STREAM = replace(SPEC, decoupled=True, instances=SPEC.instances[:1])


def in_a_stream(test: Callable[[Scene, Worker], Awaitable[None]]) -> None:
    """A worker has the one request of a stream."""

    async def run() -> None:
        scene = Scene(STREAM)
        await scene.settle()
        scene.submit(1, 1.0, None)
        await scene.settle()
        await test(scene, scene.workers[0])
        scene.close()

    asyncio.run(run())


def test_a_worker_may_go_on_once_the_first_response_has_left() -> None:
    seen: list[str] = []

    async def test(scene: Scene, worker: Worker) -> None:
        link = scene.driver.workers.instances.up["a"]
        send, loop = link.send, asyncio.get_running_loop()

        def on_send(message: wire.Message, *fds: Any) -> None:
            seen.append(type(message).__name__)
            send(message, *fds)

        def on_response(response: Any) -> None:
            response.close()
            # Like a connection: data written in one loop iteration is sent in the next.
            loop.call_soon(loop.call_soon, seen.append, "left")

        link.send = on_send  # type: ignore[method-assign]
        scene.pending[0].on_response = on_response
        for _ in range(2):
            worker.give([True])
        await scene.settle()
        (batch,) = worker.runs
        assert worker.credits == [wire.Credit(((batch.batch_id, wire.YIELD_WINDOW - 1),))]

    in_a_stream(test)
    assert seen == ["left", "Credit", "left"]


def test_a_stream_of_one_response_needs_no_credit() -> None:
    async def test(scene: Scene, worker: Worker) -> None:
        worker.give([True])
        worker.end()
        await scene.settle()
        assert scene.responses == 1
        assert scene.pending[0].answer.done()
        assert not worker.credits

    in_a_stream(test)


def test_a_worker_gets_credit_for_all_its_streams_in_one_message() -> None:
    async def run() -> None:
        scene = Scene(replace(STREAM, max_active=2, max_batch_size=1))
        await scene.settle()
        for value in (1.0, 2.0):
            scene.submit(1, value, None)
        await scene.settle()
        worker = scene.workers[0]
        for pending in scene.pending:
            pending.on_response = lambda response: response.close()
        first, second = worker.runs
        one = (wire.WireTensor("y", "FP32", (), bytes(4)),)
        for step in range(16):
            runs = (first,) if step < 5 else (first, second)
            worker.say(wire.Stepped(1, 1, 2, tuple([run.batch_id for run in runs]), None, (one,) * len(runs)))
        await scene.settle()
        assert worker.credits == [wire.Credit(((first.batch_id, 16), (second.batch_id, 10)))]
        scene.close()

    asyncio.run(run())
