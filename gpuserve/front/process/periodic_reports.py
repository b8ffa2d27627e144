"""Periodic reports of a front: model rates while requested, and events from changes in counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

from gpuserve.front.observability.metrics.change_detection import ChangeDetector
from gpuserve.front.observability.metrics.rates import RateMeter
from gpuserve.front.observability.time_slices import iterate_in_slices
from gpuserve.front.process.generations import Generations
from gpuserve.front.process.listeners import FrontListeners
from gpuserve.front.service.control import NotifySupervisor
from gpuserve.front.service.inference_service import InferenceService
from gpuserve.supervisor.control import front_messages as messages

PERIOD_S: Final = 1.0
_READINGS: Final = ("utilization", "memory_used_bytes", "memory_total_bytes")


class RateReports:
    """The rate reports of one front, sent while ``watch`` asks for them."""

    def __init__(
        self,
        service: InferenceService,
        generations: Generations,
        front_listeners: FrontListeners,
        notify_supervisor: NotifySupervisor,
    ) -> None:
        self._service = service
        self._generations = generations
        self._front_listeners = front_listeners
        self._notify_supervisor = notify_supervisor
        self._meter = RateMeter()
        self._task: asyncio.Task[None] | None = None

    def watch(self, message: messages.WatchRates) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if message.wanted:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._meter = RateMeter()
        due_at = loop.time()
        await self._rates()  # rates are counted from here
        while True:
            due_at = max(due_at + PERIOD_S, loop.time())
            await asyncio.sleep(due_at - loop.time())
            report = await self._rates()
            with contextlib.suppress(BlockingIOError):  # the supervisor's socket is full: the next will do
                self._notify_supervisor(report)

    async def _rates(self) -> messages.Rates:
        metrics = self._service.models.metrics()
        found: list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]] = []
        async for one in iterate_in_slices(metrics):
            *rates, instances = self._meter.read(one, time.monotonic())
            of = one.model, int(one.version)
            rows = [(*of, name, *map(_rounded, its)) for name, its in instances.items() if name]
            found.append(((*of, *map(_rounded, rates)), rows))
        self._meter.retain((one.model, one.version) for one in metrics)
        census = self._generations.census(messages.RequestCensus(0))
        return messages.Rates(
            census._replace(doors=self._front_listeners.door_rows()),
            round(sum(one[2] for one, _ in found), 3),
            self._front_listeners.n_connections,
            tuple(one for one, _ in found),
            tuple(each for _, instances in found for each in instances),
            tuple(self._gpus()),
        )

    def _gpus(self) -> Iterator[tuple[Any, ...]]:
        for one in self._service.control.gpus.document()["gpus"]:
            reading = one["reading"] or {}
            yield (one["device"], one["uuid"], *(reading.get(name) for name in _READINGS))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


# ---- events --------------------------------------------------------------------------------------


async def detect_changes(service: InferenceService) -> None:
    """Publish an event for every notable change of a model's counts, once a second until the front ends."""
    detector = ChangeDetector()
    while True:
        await asyncio.sleep(PERIOD_S)
        models = service.models.metrics()
        detector.retain(models)
        async for one in iterate_in_slices(models):
            for kind, model, version, instance, facts in detector.poll(one, time.monotonic()):
                service.events.publish(kind, model=model, version=version, instance=instance, **facts)
