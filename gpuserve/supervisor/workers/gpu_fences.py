"""GPU fences: no worker runs on a GPU that the front reports as lost. CUDA of the whole machine is suspected
when no worker on any GPU can open its device. A fresh process, the CUDA probe, then decides; it is asked
twice, because one process may fail for reasons of its own.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gpuserve.core.errors import StartupError
from gpuserve.core.event_log import EventKind
from gpuserve.core.states import EventTable
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.processes.child_process import ChildProcess, spawn
from gpuserve.supervisor.processes.lifecycle import InstanceState
from gpuserve.supervisor.processes.server_core import ServerCore
from gpuserve.supervisor.workers.worker_monitor import WorkerMonitor
from gpuserve_worker.execution.lifecycle import EXIT_DEVICE

logger = logging.getLogger(__name__)

#: A worker that failed to open its device this many times in a row counts as hopeless.
HOPELESS_FAILURES: Final = 2
#: Delay before the second probe, and interval of further probes.
PROBE_AGAIN_S: Final = 1.0
PROBE_INTERVAL_S: Final = 5.0
#: Time within which a probe must have opened a device.
PROBE_TIMEOUT_S: Final = 20.0
_PROBE_MODULE: Final = "gpuserve_worker.cuda.probe"
_ENDING: Final = frozenset({InstanceState.STOPPING, InstanceState.STOPPED})


class CudaSuspicion(enum.Enum):
    """Suspected CUDA failure of the whole machine, with the evidence for it."""

    WORKING = "WORKING"
    PROBING = "PROBING"
    PROBING_AGAIN = "PROBING_AGAIN"
    BROKEN = "BROKEN"


class CudaEvidence(enum.Enum):
    """Evidence about CUDA: a suspicion, or the result of a process that used CUDA."""

    SUSPECTED = "SUSPECTED"
    WORKS = "WORKS"
    FAILS = "FAILS"


CUDA_STEPS: Final = EventTable(
    "CUDA",
    {
        (CudaSuspicion.WORKING, CudaEvidence.SUSPECTED): CudaSuspicion.PROBING,
        (CudaSuspicion.WORKING, CudaEvidence.WORKS): CudaSuspicion.WORKING,
        (CudaSuspicion.PROBING, CudaEvidence.WORKS): CudaSuspicion.WORKING,
        (CudaSuspicion.PROBING, CudaEvidence.FAILS): CudaSuspicion.PROBING_AGAIN,
        (CudaSuspicion.PROBING_AGAIN, CudaEvidence.WORKS): CudaSuspicion.WORKING,
        (CudaSuspicion.PROBING_AGAIN, CudaEvidence.FAILS): CudaSuspicion.BROKEN,
        (CudaSuspicion.BROKEN, CudaEvidence.WORKS): CudaSuspicion.WORKING,
        (CudaSuspicion.BROKEN, CudaEvidence.FAILS): CudaSuspicion.BROKEN,
    },
)


class GpuFences:
    """The fences of lost GPUs, and the suspicion that CUDA has failed. ``lost`` is the dictionary of
    ``WorkerContext``, which this class maintains. ``workers`` returns all workers of this server.
    """

    def __init__(
        self, core: ServerCore, lost: dict[str, str], workers: Callable[[], Iterable[WorkerMonitor]]
    ) -> None:
        self._reactor = core.reactor
        self._front = core.front
        self._events = core.events
        self._lost = lost
        self._workers = workers
        self._gpus: tuple[tuple[str, str, str], ...] = ()
        self._suspicion = CudaSuspicion.WORKING
        self._probe = CudaProbe(core, self._on_probed)
        self._is_closed = False

    def announce(self) -> None:
        """Tell a new front which GPUs are lost, and whether CUDA works."""
        self._front.send(messages.LostGpus(self._gpus))
        self._send_cuda_state()

    def close(self) -> None:
        self._is_closed = True
        self._probe.close()

    def gpus_lost(self, gpus: Sequence[tuple[str, str, str]]) -> None:
        """Fence the workers on these GPUs, (UUID, device, reason), and release the workers on all others."""
        before = set(self._lost)
        self._record(self._gpus, gpus)
        self._gpus = tuple(gpus)
        self._lost.clear()
        for uuid, device, reason in gpus:
            self._lost[uuid] = f"its GPU {device or uuid} is lost: {reason}"
        for worker in list(self._workers()):
            lost = self._lost.keys() & worker.instance.placement.gpu_uuids
            if not lost:
                worker.release()
            elif lost - before:
                worker.fence()
        self.check()

    def _record(self, before: Sequence[tuple[str, str, str]], now: Sequence[tuple[str, str, str]]) -> None:
        were, are = {one[0] for one in before}, {one[0] for one in now}
        for uuid, device, reason in now:
            if uuid not in were:
                self._events.record(EventKind.GPU_FENCED, uuid=uuid, device=device, reason=reason)
        for uuid, device, _ in before:
            if uuid not in are:
                self._events.record(EventKind.GPU_RELEASED, uuid=uuid, device=device)

    def instance_ready(self, worker: WorkerMonitor) -> None:
        """Trust CUDA again after a worker on a GPU has opened its device: no probe could show more."""
        if worker.instance.placement.gpu_uuids and self._suspicion is CudaSuspicion.BROKEN:
            self._add_evidence(CudaEvidence.WORKS)

    def check(self) -> None:
        """Suspect CUDA if no GPU has a worker that can run on it."""
        if self._suspicion is CudaSuspicion.WORKING and not self._probe.is_running and self._is_hopeless():
            self._add_evidence(CudaEvidence.SUSPECTED)
            self._start_probe()

    def _is_hopeless(self) -> bool:
        by_gpu: dict[str, list[WorkerMonitor]] = {}
        for worker in self._workers():
            place = worker.instance
            if place.device != "cpu" and worker.lifecycle.state not in _ENDING:
                for gpu in place.placement.gpu_uuids or (place.device,):
                    by_gpu.setdefault(gpu, []).append(worker)
        return bool(by_gpu) and all(any(map(_is_hopeless, group)) for group in by_gpu.values())

    def _start_probe(self) -> None:
        is_working = self._suspicion is CudaSuspicion.WORKING
        if not (is_working or self._is_closed or self._probe.is_running):
            self._probe.start()
            if not self._probe.is_running:
                self._reactor.call_later(PROBE_INTERVAL_S, self._start_probe)

    def _on_probed(self, works: bool) -> None:
        if self._suspicion is not CudaSuspicion.WORKING:  # a worker may have opened its device meanwhile
            self._add_evidence(CudaEvidence.WORKS if works else CudaEvidence.FAILS)
        is_suspected = self._suspicion in {CudaSuspicion.PROBING_AGAIN, CudaSuspicion.BROKEN}
        is_second = self._suspicion is CudaSuspicion.PROBING_AGAIN
        then = self._start_probe if is_suspected else self.check
        self._reactor.call_later(PROBE_AGAIN_S if is_second else PROBE_INTERVAL_S, then)

    def _add_evidence(self, event: CudaEvidence) -> None:
        worked = self._works
        self._suspicion = CUDA_STEPS.after(self._suspicion, event)
        if self._works == worked:
            return
        if worked:
            logger.critical("no process can use CUDA on this machine; the server is not live until one can")
        else:
            logger.info("CUDA can be used again")
        self._send_cuda_state()

    @property
    def _works(self) -> bool:
        """False from the failure of two probes until the success of one."""
        return self._suspicion is not CudaSuspicion.BROKEN

    def _send_cuda_state(self) -> None:
        self._front.send(messages.CudaState(self._works))


def _is_hopeless(worker: WorkerMonitor) -> bool:
    return worker.lifecycle.state is InstanceState.FENCED or worker.device_failures >= HOPELESS_FAILURES


class CudaProbe:
    """A short-lived process that tries CUDA. ``on_result`` is called with whether CUDA worked."""

    def __init__(self, core: ServerCore, on_result: Callable[[bool], None]) -> None:
        self._reactor, self._mps = core.reactor, core.mps
        self._on_result = on_result
        self._process: ChildProcess | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start a process. A failed start has no result, because it says nothing about CUDA."""
        try:
            environment = self._mps.variables(0.0)
            process, _ = spawn(
                _PROBE_MODULE, channels=0, environment=environment, relay_output=False, shows_stacks=False
            )
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
        self._on_result(not process.killed and process.exit_status != EXIT_DEVICE)

    def _reap(self, process: ChildProcess) -> None:
        self._reactor.unwatch(process.pidfd)
        process.exit_reason()
        process.close()
        self._process = None
