"""What the front knows of GPUs, on its loop: the monitor's news, and who is told of changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from gpuserve.devices.machine import GpuMonitorEvent, NvmlMissingEvent, NvmlRound, Xid
from gpuserve.devices.names import number_of
from gpuserve.front.observe.gpu_health import exposition
from gpuserve.front.observe.gpu_health.exposition import ModelMemory
from gpuserve.front.observe.gpu_health.fleet import GpuFleet, LostGpu
from gpuserve.front.observe.gpu_health.health import GpuState
from gpuserve.front.observe.gpu_health.monitor import GpuMonitor
from gpuserve.front.observe.triton_metrics import Family

logger = logging.getLogger(__name__)


class GpuWatch:
    """The GPUs; nothing is known without ``start()``. ``on_lost`` is told all lost GPUs when those change."""

    def __init__(
        self,
        interval_s: float = 1.0,
        on_lost: Callable[[tuple[LostGpu, ...]], None] = lambda lost: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        #: Whether a new process can use CUDA, as the supervisor last found out.
        self.cuda_works = True
        self._interval_s = interval_s
        self._on_lost = on_lost
        self._on_change = on_change
        self._fleet = GpuFleet(interval_s, time.monotonic())
        self._monitor: GpuMonitor | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: (model, version) of each worker, by its process id.
        self._workers: dict[int, tuple[str, str]] = {}
        self._told_lost: tuple[LostGpu, ...] = ()
        self._states: Mapping[str, GpuState] = {}
        self._absence = ""
        self._is_called = False

    # ---- life -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the monitor's thread, and look at the age of its news from time to time."""
        loop = asyncio.get_running_loop()

        def tell(news: GpuMonitorEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the front has ended
                loop.call_soon_threadsafe(self._hear, news)

        self._monitor = GpuMonitor(self._interval_s, tell)
        self._monitor.start()
        self._timer = loop.call_later(self._interval_s, self._on_time)

    def stop(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._monitor = self._timer = None

    def restore(self, lost: Iterable[LostGpu]) -> None:
        self._told_lost = tuple(lost)
        self._fleet.restore(self._told_lost, time.monotonic())
        self._look_at_changes()

    # ---- who uses them --------------------------------------------------------------------

    def call(self, devices: Mapping[str, str]) -> None:
        """Note what models call GPUs: the name of the device ("cuda:0") by UUID."""
        if devices and not self._is_called:
            self._is_called = True
            self._tell_absence()
        for uuid, device in devices.items():
            self._fleet.call(uuid, device)

    def worker_up(self, pid: int, model: str, version: str) -> None:
        self._workers[pid] = (model, version)

    def worker_down(self, pid: int) -> None:
        self._workers.pop(pid, None)

    # ---- questions ------------------------------------------------------------------------

    def are_enough(self, uuids: Collection[str], least: int) -> bool:
        """Whether ``least`` of these GPUs are not lost, or all of them where there are fewer."""
        lost = {one.uuid for one in self._told_lost}
        return len(set(uuids) - lost) >= min(least, len(set(uuids)))

    def why_lost(self, uuids: Iterable[str]) -> str:
        """Why nothing can run on these GPUs, where all of them are lost; "" where one is not."""
        lost = {one.uuid: one for one in self._told_lost}
        found = [lost.get(uuid) for uuid in dict.fromkeys(uuids)]
        texts = [f"GPU {one.device or one.uuid} is lost: {one.reason}" for one in found if one is not None]
        return ", ".join(texts) if len(texts) == len(found) else ""

    def model_memory(self) -> Iterator[ModelMemory]:
        """What the workers of each model have on each GPU, as far as the driver tells."""
        for gpu in self._fleet:
            nbytes: Counter[tuple[str, str]] = Counter()
            for pid, used in (gpu.reading.processes if gpu.reading else {}).items():
                if pid in self._workers:
                    nbytes[self._workers[pid]] += used
            for (model, version), total in sorted(nbytes.items()):
                yield ModelMemory(model, version, gpu.uuid, gpu.device, total)

    def process_memory(self) -> tuple[tuple[int, int], ...]:
        """The pid of each worker, and the bytes that it has on all GPUs, as far as the driver tells."""
        nbytes: Counter[int] = Counter()
        for gpu in self._fleet:
            nbytes.update(gpu.reading.processes if gpu.reading else {})
        return tuple((pid, used) for pid, used in nbytes.items() if pid in self._workers)

    def memory_of(self, model: str, version: str) -> dict[int, int]:
        """Bytes that the workers of a model have on each GPU that has a number, by that number."""
        return {
            number: one.nbytes
            for one in self.model_memory()
            if (one.model, one.version) == (model, version) and (number := number_of(one.device)) is not None
        }

    def families(self) -> list[Family]:
        now = time.monotonic()
        self._look(now)
        return list(exposition.gpu_families(self._fleet, self.model_memory(), self._fleet.age_s(now)))

    def document(self) -> dict[str, Any]:
        now = time.monotonic()
        stale = self._look(now)
        return exposition.gpus_document(self._fleet, self.model_memory(), self._fleet.age_s(now), stale)

    # ---- news -----------------------------------------------------------------------------

    def _hear(self, news: GpuMonitorEvent) -> None:
        now = time.monotonic()
        match news:
            case NvmlRound():
                self._fleet.hear(news, now)
            case Xid(uuids, number):
                self._fleet.hear_xid(news, now)
                logger.warning("the driver reported Xid %d for %s", number, ", ".join(uuids) or "a lost GPU")
            case NvmlMissingEvent(reason):
                self.stop()
                self._absence = reason
                self._tell_absence()
        self._look_at_changes()

    def _tell_absence(self) -> None:
        """Say why GPUs are not watched: to be seen where a model runs on one, and only there."""
        if self._absence:
            level = logging.WARNING if self._is_called else logging.DEBUG
            logger.log(level, "GPUs are not watched: %s", self._absence)

    def _on_time(self) -> None:
        self._look(time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._on_time)

    def _look(self, now: float) -> bool:
        """Whether nothing was heard for too long; where nobody asks, nothing is expected."""
        if self._monitor is None:
            return False
        self._fleet.look(now)
        self._look_at_changes()
        return self._fleet.is_stale(now)

    def _look_at_changes(self) -> None:
        before, self._states = self._states, self._fleet.states()
        if self._states == before:
            return
        for gpu in self._fleet:
            if self._states[gpu.uuid] is not before.get(gpu.uuid, GpuState.HEALTHY):
                _log(gpu.device or gpu.uuid, gpu.uuid, self._states[gpu.uuid], gpu.life.reason)
        lost = self._fleet.lost()
        if lost != self._told_lost:
            self._told_lost = lost
            self._on_lost(lost)
        if self._monitor is not None:
            self._monitor.is_gpu_lost = bool(lost)
        self._on_change()


def _log(device: str, uuid: str, state: GpuState, reason: str) -> None:
    match state:
        case GpuState.LOST:
            logger.error("GPU %s (%s) is lost: %s", device, uuid, reason)
        case GpuState.SUSPECT:
            logger.warning("NVML does not answer for GPU %s (%s)", device, uuid)
        case GpuState.HEALTHY:
            logger.info("GPU %s (%s) is healthy again", device, uuid)
