"""The GPUs as far as workers are concerned: on one that is lost none runs, and where none can run on any, a
fresh process is asked whether that is the machine's fault.

That a GPU is lost is for the front to find out, which asks the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gpuserve.supervisor.cuda_doubt import CudaDoubt, Doubt, DoubtEvent
from gpuserve.supervisor.cuda_probe import CudaProbe
from gpuserve.supervisor.front_keeper import FrontKeeper
from gpuserve.supervisor.life import InstanceState
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.worker_keeper import WorkerKeeper

logger = logging.getLogger(__name__)

#: A worker that could not open its device so many times in a row will not the next time either.
HOPELESS_FAILURES: Final = 2
#: From one process that tries CUDA to the next.
PROBE_AGAIN_S: Final = 1.0
PROBE_INTERVAL_S: Final = 5.0
_ENDING: Final = frozenset({InstanceState.STOPPING, InstanceState.STOPPED})


class GpuFences:
    """``workers`` gives all workers of this server; those of attached programs are their programs' own."""

    def __init__(self, reactor: Reactor, workers: Callable[[], Iterable[WorkerKeeper]]) -> None:
        self._reactor = reactor
        self._workers = workers
        self._front: FrontKeeper | None = None
        self._lost: dict[str, str] = {}
        self._gpus: tuple[tuple[str, str, str], ...] = ()
        self._doubt = CudaDoubt()
        self._probe = CudaProbe(reactor, self._on_probed)
        self._is_closed = False

    def announce(self, front: FrontKeeper) -> None:
        """What a new front must know."""
        self._front = front
        front.lost_gpus(self._gpus)
        front.cuda_state(self._doubt.works)

    def close(self) -> None:
        """The server ends: nothing is tried any more."""
        self._is_closed = True
        self._probe.close()

    # ---- lost GPUs ------------------------------------------------------------------------

    def why_lost(self, uuid: str) -> str:
        """Why no worker is to run on a GPU; "" where it may."""
        return self._lost.get(uuid, "")

    def gpus_lost(self, gpus: Sequence[tuple[str, str, str]]) -> None:
        """These are lost, and no others."""
        before = self._lost
        self._gpus = tuple(gpus)
        self._lost = {uuid: f"its GPU {device or uuid} is lost: {reason}" for uuid, device, reason in gpus}
        for worker in list(self._workers()):
            if worker.gpu_uuid not in self._lost:
                worker.release()
            elif worker.gpu_uuid not in before:
                worker.fence()
        self._look()

    # ---- CUDA as a whole ------------------------------------------------------------------

    def instance_ready(self, worker: WorkerKeeper) -> None:
        """A worker on a GPU has opened its device: no process could show more."""
        if worker.gpu_uuid and self._doubt.state is Doubt.BROKEN:
            self._learn(DoubtEvent.WORKS)

    def instance_lost(self) -> None:
        """A worker died, for whatever reason."""
        self._look()

    def _look(self) -> None:
        """Doubt, where no GPU has a worker that can run on it."""
        if self._doubt.state is Doubt.WORKING and not self._probe.is_asking and self._is_hopeless():
            self._learn(DoubtEvent.DOUBTED)
            self._ask()

    def _is_hopeless(self) -> bool:
        by_gpu: dict[str, list[WorkerKeeper]] = {}
        for worker in self._workers():
            if worker.instance.device != "cpu" and worker.life.state not in _ENDING:
                by_gpu.setdefault(worker.gpu_uuid or worker.instance.device, []).append(worker)
        return bool(by_gpu) and all(any(map(_is_hopeless, group)) for group in by_gpu.values())

    def _ask(self) -> None:
        if not self._is_closed and not self._probe.is_asking:
            self._probe.ask()
            if not self._probe.is_asking:
                self._reactor.call_later(PROBE_INTERVAL_S, self._ask)

    def _on_probed(self, works: bool) -> None:
        if self._doubt.state is not Doubt.WORKING:  # a worker may have shown meanwhile that it works
            self._learn(DoubtEvent.WORKS if works else DoubtEvent.FAILS)
        match self._doubt.state:
            case Doubt.ASKING_AGAIN:
                self._reactor.call_later(PROBE_AGAIN_S, self._ask)
            case Doubt.BROKEN:
                self._reactor.call_later(PROBE_INTERVAL_S, self._ask_if_broken)
            case _:
                self._reactor.call_later(PROBE_INTERVAL_S, self._look)

    def _ask_if_broken(self) -> None:
        if self._doubt.state is Doubt.BROKEN:
            self._ask()

    def _learn(self, event: DoubtEvent) -> None:
        worked = self._doubt.works
        self._doubt.apply(event)
        if self._doubt.works == worked:
            return
        if worked:
            logger.critical("no process can use CUDA here any more; the server is not live until one can")
        else:
            logger.info("CUDA can be used again")
        if self._front is not None:
            self._front.cuda_state(self._doubt.works)


def _is_hopeless(worker: WorkerKeeper) -> bool:
    return worker.life.state is InstanceState.FENCED or worker.device_failures >= HOPELESS_FAILURES
