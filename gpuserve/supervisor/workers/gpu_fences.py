"""The GPUs as far as workers are concerned: on one that is lost, as the front says, none runs. CUDA is
doubted when no worker on any GPU can open its device. Then a fresh process is asked, and only its word
counts; twice, as one may fail for reasons of its own.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gpuserve.control import messages
from gpuserve.control.reactor import Reactor
from gpuserve.errors import StartupError
from gpuserve.journal.kinds import EventKind
from gpuserve.states import EventTable
from gpuserve.supervisor.core.life import InstanceState
from gpuserve.supervisor.core.processes import ChildProcess, spawn
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.workers.worker_keeper import WorkerKeeper
from gpuserve_worker.running.lifecycle import EXIT_DEVICE

logger = logging.getLogger(__name__)

#: A worker that could not open its device so many times in a row will not the next time either.
HOPELESS_FAILURES: Final = 2
#: From one process that tries CUDA to the next.
PROBE_AGAIN_S: Final = 1.0
PROBE_INTERVAL_S: Final = 5.0
#: A process that has not opened a device by then cannot.
PROBE_TIMEOUT_S: Final = 20.0
_PROBE_MODULE: Final = "gpuserve_worker.cuda.probe"
_ENDING: Final = frozenset({InstanceState.STOPPING, InstanceState.STOPPED})


class Doubt(enum.Enum):
    """What is believed of CUDA on this machine."""

    WORKING = "WORKING"
    ASKING = "ASKING"
    ASKING_AGAIN = "ASKING_AGAIN"
    BROKEN = "BROKEN"


class DoubtEvent(enum.Enum):
    """What can be learnt of it."""

    DOUBTED = "DOUBTED"
    WORKS = "WORKS"
    FAILS = "FAILS"


DOUBTS: Final = EventTable(
    "CUDA",
    {
        (Doubt.WORKING, DoubtEvent.DOUBTED): Doubt.ASKING,
        (Doubt.WORKING, DoubtEvent.WORKS): Doubt.WORKING,
        (Doubt.ASKING, DoubtEvent.WORKS): Doubt.WORKING,
        (Doubt.ASKING, DoubtEvent.FAILS): Doubt.ASKING_AGAIN,
        (Doubt.ASKING_AGAIN, DoubtEvent.WORKS): Doubt.WORKING,
        (Doubt.ASKING_AGAIN, DoubtEvent.FAILS): Doubt.BROKEN,
        (Doubt.BROKEN, DoubtEvent.WORKS): Doubt.WORKING,
        (Doubt.BROKEN, DoubtEvent.FAILS): Doubt.BROKEN,
    },
)


class GpuFences:
    """Keeps workers off GPUs that are lost, and finds out whether CUDA works at all. ``lost`` is filled in
    here, as ``WorkerCare`` has it. ``workers`` gives all workers of this server; those of attached programs
    are their programs' own.
    """

    def __init__(
        self, core: ServerCore, lost: dict[str, str], workers: Callable[[], Iterable[WorkerKeeper]]
    ) -> None:
        self._reactor = core.reactor
        self._front = core.front
        self._events = core.events
        self._lost = lost
        self._workers = workers
        self._gpus: tuple[tuple[str, str, str], ...] = ()
        self._doubt = Doubt.WORKING
        self._probe = CudaProbe(core.reactor, self._on_probed)
        self._is_closed = False

    def announce(self) -> None:
        """Tell a new front which GPUs are lost, and whether CUDA can be used."""
        self._front.send(messages.LostGpus(self._gpus))
        self._tell_cuda_state()

    def close(self) -> None:
        self._is_closed = True
        self._probe.close()

    # ---- lost GPUs ------------------------------------------------------------------------

    def gpus_lost(self, gpus: Sequence[tuple[str, str, str]]) -> None:
        """Fence the workers on these GPUs, (UUID, device, reason), and release those on all others."""
        before = set(self._lost)
        self._tell(self._gpus, gpus)
        self._gpus = tuple(gpus)
        self._lost.clear()
        for uuid, device, reason in gpus:
            self._lost[uuid] = f"its GPU {device or uuid} is lost: {reason}"
        for worker in list(self._workers()):
            uuid = worker.instance.placement.gpu_uuid
            if uuid not in self._lost:
                worker.release()
            elif uuid not in before:
                worker.fence()
        self.look()

    def _tell(self, before: Sequence[tuple[str, str, str]], now: Sequence[tuple[str, str, str]]) -> None:
        were, are = {one[0] for one in before}, {one[0] for one in now}
        for uuid, device, reason in now:
            if uuid not in were:
                self._events.tell(EventKind.GPU_FENCED, uuid=uuid, device=device, reason=reason)
        for uuid, device, _ in before:
            if uuid not in are:
                self._events.tell(EventKind.GPU_RELEASED, uuid=uuid, device=device)

    # ---- CUDA as a whole ------------------------------------------------------------------

    def instance_ready(self, worker: WorkerKeeper) -> None:
        """Believe in CUDA again where a worker on a GPU has opened its device: no probe could show more."""
        if worker.instance.placement.gpu_uuid and self._doubt is Doubt.BROKEN:
            self._learn(DoubtEvent.WORKS)

    def look(self) -> None:
        """Doubt CUDA, where no GPU has a worker that can run on it."""
        if self._doubt is Doubt.WORKING and not self._probe.is_asking and self._is_hopeless():
            self._learn(DoubtEvent.DOUBTED)
            self._ask()

    def _is_hopeless(self) -> bool:
        by_gpu: dict[str, list[WorkerKeeper]] = {}
        for worker in self._workers():
            place = worker.instance
            if place.device != "cpu" and worker.life.state not in _ENDING:
                by_gpu.setdefault(place.placement.gpu_uuid or place.device, []).append(worker)
        return bool(by_gpu) and all(any(map(_is_hopeless, group)) for group in by_gpu.values())

    def _ask(self) -> None:
        if self._doubt is not Doubt.WORKING and not self._is_closed and not self._probe.is_asking:
            self._probe.ask()
            if not self._probe.is_asking:
                self._reactor.call_later(PROBE_INTERVAL_S, self._ask)

    def _on_probed(self, works: bool) -> None:
        if self._doubt is not Doubt.WORKING:  # a worker may have shown meanwhile that it works
            self._learn(DoubtEvent.WORKS if works else DoubtEvent.FAILS)
        match self._doubt:
            case Doubt.ASKING_AGAIN:
                self._reactor.call_later(PROBE_AGAIN_S, self._ask)
            case Doubt.BROKEN:
                self._reactor.call_later(PROBE_INTERVAL_S, self._ask)
            case _:
                self._reactor.call_later(PROBE_INTERVAL_S, self.look)

    def _learn(self, event: DoubtEvent) -> None:
        worked = self._works
        self._doubt = DOUBTS.after(self._doubt, event)
        if self._works == worked:
            return
        if worked:
            logger.critical("no process can use CUDA here any more; the server is not live until one can")
        else:
            logger.info("CUDA can be used again")
        self._tell_cuda_state()

    @property
    def _works(self) -> bool:
        """False only after two processes have failed, until one succeeds."""
        return self._doubt is not Doubt.BROKEN

    def _tell_cuda_state(self) -> None:
        self._front.send(messages.CudaState(self._works))


def _is_hopeless(worker: WorkerKeeper) -> bool:
    return worker.life.state is InstanceState.FENCED or worker.device_failures >= HOPELESS_FAILURES


class CudaProbe:
    """A short-lived process that tries CUDA, one at a time. ``answer`` is told whether it could use CUDA."""

    def __init__(self, reactor: Reactor, answer: Callable[[bool], None]) -> None:
        self._reactor = reactor
        self._answer = answer
        self._process: ChildProcess | None = None

    @property
    def is_asking(self) -> bool:
        return self._process is not None

    def ask(self) -> None:
        """Start a process. Where that fails there is no answer, because it says nothing of CUDA."""
        try:
            process, _ = spawn(_PROBE_MODULE, channels=0, relay_output=False, shows_stacks=False)
        except StartupError:
            return
        self._process = process
        self._reactor.watch(process.pidfd, self._on_ended)
        self._reactor.call_later(PROBE_TIMEOUT_S, lambda: self._on_timeout(process))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._reap(self._process)

    def _on_timeout(self, process: ChildProcess) -> None:
        if process is self._process:
            process.kill()

    def _on_ended(self) -> None:
        assert self._process is not None
        process = self._process
        self._reap(process)
        self._answer(not process.killed and process.exit_status != EXIT_DEVICE)

    def _reap(self, process: ChildProcess) -> None:
        self._reactor.unwatch(process.pidfd)
        process.exit_reason()
        process.close()
        self._process = None
