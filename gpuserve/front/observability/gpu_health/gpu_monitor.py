"""Monitoring of GPUs: a thread that reads NVML periodically and receives Xids between rounds, and the
event-loop side that updates GPU states. A hanging NVML call hangs only this thread: it is a daemon that is
never joined, and the age of its readings shows that it hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.devices.inventory import load_nvml, read_machine, visible_devices
from gpuserve.devices.machine import (
    SLOWDOWNS,
    GpuLink,
    GpuLinks,
    GpuMonitorEvent,
    GpuReading,
    NvmlMissingEvent,
    NvmlRound,
    Xid,
)
from gpuserve.devices.names import VARIABLE, number_of
from gpuserve.devices.nvml import Nvml, NvmlMissing, NvmlUnresponsive
from gpuserve.front.observability.gpu_health.gpu_states import (
    NON_FENCING_XIDS,
    GpuSet,
    GpuState,
    LostGpu,
    WatchedGpu,
)
from gpuserve.front.observability.metrics.prometheus import Family, family

logger = logging.getLogger(__name__)

#: NVML is reopened after this many intervals if it could not be opened or a GPU is missing: an open NVML
#: never updates its list or the handle of a lost GPU.
REOPEN_INTERVALS: Final = 5


#: The memory of a CUDA context and its libraries, which no allocator gives.
_BESIDE_LIMIT_NBYTES: Final = 1 << 30


class GpuMonitor:
    """The NVML thread. It passes readings to ``publish_news``. While ``is_gpu_lost``, NVML is reopened."""

    def __init__(
        self,
        interval_s: float,
        publish_news: Callable[[GpuMonitorEvent], None],
        load: Callable[[], Any] = load_nvml,
    ) -> None:
        self.is_gpu_lost = False
        self._interval_s = interval_s
        self._publish_news = publish_news
        self._load = load
        #: The server's names of the GPUs, by UUID; read in the first round.
        self._names: Mapping[str, str] | None = None
        self._stopped = threading.Event()
        self._has_logged_failure = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpuserve-nvml", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._monitor_until_reopen()
        except NvmlMissing as absent:
            self._publish(NvmlMissingEvent(str(absent)))

    def _monitor_until_reopen(self) -> None:
        try:
            nvml = Nvml(self._load)
            if self._names is None:
                self._names = names_of_gpus(self._load)
        except (NvmlMissing, NvmlUnresponsive) as silent:
            # A driver that is reloaded is absent for a moment. Absence is final only if NVML never opened.
            if isinstance(silent, NvmlMissing) and self._names is None and not self.is_gpu_lost:
                raise
            if not self._has_logged_failure:
                logger.warning("failed to open NVML, GPUs are not monitored now: %s", silent)
            self._has_logged_failure = True
            self._stopped.wait(self._interval_s * REOPEN_INTERVALS)
            return
        self._has_logged_failure = False
        try:
            self._publish(nvml.links(self._names))
            self._read_rounds(nvml)
        finally:
            nvml.close()

    def _read_rounds(self, nvml: Nvml) -> None:
        bad_rounds = 0
        while not self._stopped.is_set() and bad_rounds < REOPEN_INTERVALS:
            due_at = time.monotonic() + self._interval_s
            report = nvml.read(self._names or {})
            self._publish(report)
            is_bad = self.is_gpu_lost or any(one.reading is None for one in report.gpus)
            bad_rounds = bad_rounds + 1 if is_bad else 0
            self._wait(nvml, due_at)

    def _wait(self, nvml: Nvml, due_at: float) -> None:
        """Wait for the next round, and pass on errors that the driver reports meanwhile."""
        while not self._stopped.is_set() and (left_s := due_at - time.monotonic()) > 0:
            try:
                xid = nvml.next_xid(left_s)
            except NvmlUnresponsive:
                self._stopped.wait(left_s)
                return
            if xid is not None:
                self._publish(xid)

    def _publish(self, news: GpuMonitorEvent) -> None:
        if not self._stopped.is_set():
            self._publish_news(news)


class _Worker(NamedTuple):
    """A worker of a model. ``pid`` is 0 if it is not visible here. Its allocators hold ``nbytes`` on
    ``device``, and ``locked_nbytes`` of the host are page-locked for it. ``limit_nbytes`` is its limit
    (``gpu_memory_nbytes``), until it was found to take more.
    """

    pid: int
    model: tuple[str, str]
    device: str = ""
    nbytes: int = 0
    limit_nbytes: int = 0
    locked_nbytes: int = 0


def names_of_gpus(load: Callable[[], Any]) -> dict[str, str]:
    gpus = read_machine(Path("/"), load).gpus
    return {one.uuid: one.name for one in visible_devices(gpus, os.environ.get(VARIABLE))}


# ---- GPU states on the event loop ----------------------------------------------------------------


class GpuWatch:
    """The GPUs of a front; none without ``start()``. ``on_lost`` receives all lost GPUs at each change."""

    def __init__(
        self,
        interval_s: float = 1.0,
        on_lost: Callable[[tuple[LostGpu, ...]], None] = lambda lost: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        #: True if a new process can use CUDA, as the supervisor last determined.
        self.cuda_works = True
        self._interval_s = interval_s
        self._on_lost = on_lost
        self._on_change = on_change
        self._gpus = GpuSet(interval_s, time.monotonic())
        self._monitor: GpuMonitor | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: By link: process ids of attached programs' workers in other namespaces are all 0.
        self._workers: dict[Hashable, _Worker] = {}
        self._reported_lost: tuple[LostGpu, ...] = ()
        self._states: Mapping[str, GpuState] = {}
        self._links: Mapping[frozenset[str], GpuLink] = {}
        self._absence = ""
        self._has_models = False

    # ---- life -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the NVML thread, and check the age of its readings periodically."""
        loop = asyncio.get_running_loop()

        def publish_news(news: GpuMonitorEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: the front has ended
                loop.call_soon_threadsafe(self._on_news, news)

        self._monitor = GpuMonitor(self._interval_s, publish_news)
        self._monitor.is_gpu_lost = bool(self._reported_lost)
        self._monitor.start()
        self._timer = loop.call_later(self._interval_s, self._on_timer)

    def stop(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._monitor = self._timer = None

    def restore(self, lost: Iterable[LostGpu]) -> None:
        self._reported_lost = tuple(lost)
        self._gpus.restore(self._reported_lost, time.monotonic())
        self._publish_changes()
        if self._absence and self._reported_lost:  # NVML worked in an earlier front
            self.start()

    # ---- models and workers -----------------------------------------------------------------

    def set_device_names(self, devices: Mapping[str, str]) -> None:
        """Set the device names ("cuda:0") of GPUs in models, by UUID."""
        if devices and not self._has_models:
            self._has_models = True
            self._log_absence()
        for uuid, device in devices.items():
            self._gpus.set_device(uuid, device)

    def worker_up(self, link: Hashable, pid: int, model: str, version: str, limit_nbytes: int = 0) -> None:
        """Add a worker, which is to have at most ``limit_nbytes`` on its GPUs, unless that is 0."""
        self._workers[link] = _Worker(pid, (model, version), limit_nbytes=limit_nbytes)

    def worker_down(self, link: Hashable) -> None:
        self._workers.pop(link, None)

    def worker_reported(self, link: Hashable, device: str, nbytes: int, locked_nbytes: int = 0) -> None:
        """Record a worker's own account. Its bytes on the GPU count in containers in which NVML does not know
        its process id.
        """
        if link in self._workers:
            self._workers[link] = self._workers[link]._replace(
                device=device, nbytes=nbytes, locked_nbytes=locked_nbytes
            )

    # ---- queries ------------------------------------------------------------------------------

    def are_enough(self, uuids: Collection[str], least: int) -> bool:
        """Return whether at least ``least`` of these GPUs are not lost, or all of them if there are fewer."""
        lost = {one.uuid for one in self._reported_lost}
        return len(set(uuids) - lost) >= min(least, len(set(uuids)))

    def why_lost(self, instances: Iterable[tuple[str, ...]]) -> str:
        """Return why no instance can run if each has a lost one among its GPUs, by UUID; else ""."""
        texts = {}
        for uuid, device, reason in self._reported_lost:
            texts[uuid] = f"GPU {device or uuid} is lost: {reason}"
        found = [[texts[uuid] for uuid in uuids if uuid in texts] for uuids in instances]
        return ", ".join(dict.fromkeys(itertools.chain(*found))) if all(found) else ""

    def link_between(self, device: str, other: str) -> GpuLink:
        """Return how two devices, such as "cuda:0", reach each other's memory."""
        return GpuLink.SAME if device == other else self._links.get(frozenset((device, other)), GpuLink.HOST)

    def model_memory(self) -> Iterator[ModelGpuMemory]:
        """Yield the memory of each model's workers on each GPU: by the driver, else by their allocators."""
        for gpu in self._gpus:
            nbytes: Counter[tuple[str, str]] = Counter()
            for worker, used in self._workers_on(gpu):
                nbytes[worker.model] += used
            for (model, version), total in sorted(nbytes.items()):
                yield ModelGpuMemory(model, version, gpu.uuid, gpu.device, total)

    def process_memory(self) -> tuple[tuple[int, int], ...]:
        """Return the pid and the bytes on all GPUs of each worker: by the driver, else by its allocators."""
        nbytes: Counter[int] = Counter()
        for gpu in self._gpus:
            nbytes.update({worker.pid: used for worker, used in self._workers_on(gpu) if worker.pid})
        return tuple(nbytes.items())

    def _workers_on(self, gpu: WatchedGpu) -> Iterator[tuple[_Worker, int]]:
        """Yield each worker with its bytes on a GPU; one of those that are threads of one process."""
        by_driver = gpu.reading.processes if gpu.reading else {}
        counted = set()
        for worker in self._workers.values():
            reported = worker.nbytes if worker.device == gpu.device else 0
            used = by_driver.get(worker.pid, reported)
            if used and worker.pid not in counted:
                counted |= {worker.pid} - {0}
                yield worker, used

    def memory_of(self, model: str, version: str) -> dict[int, int]:
        """Return the bytes of a model's workers by GPU number, for GPUs with a number."""
        return {
            number: one.nbytes
            for one in self.model_memory()
            if (one.model, one.version) == (model, version) and (number := number_of(one.device)) is not None
        }

    def families(self) -> list[Family]:
        now = time.monotonic()
        self._check_age(now)
        locked: Counter[str] = Counter()
        for one in self._workers.values():
            locked[one.device] += one.locked_nbytes
        return [
            *gpu_families(self._gpus, self.model_memory(), self._gpus.age_s(now)),
            family(
                "gpuserve_gpu_locked_host_bytes",
                "gauge",
                "Bytes of host memory that workers have page-locked for the GPU",
                [(_labels(one), locked[one.device]) for one in self._gpus],
            ),
        ]

    def document(self) -> dict[str, Any]:
        now = time.monotonic()
        stale = self._check_age(now)
        return gpus_document(self._gpus, self.model_memory(), self._gpus.age_s(now), stale)

    # ---- NVML results ---------------------------------------------------------------------------

    def _on_news(self, news: GpuMonitorEvent) -> None:
        now = time.monotonic()
        match news:
            case NvmlRound():
                self._gpus.update(news, now)
                self._check_limits()
            case GpuLinks(links):
                self._links = links
            case Xid(uuids, number):
                self._gpus.count_xid(news, now)
                gpus, kept = ", ".join(uuids) or "a lost GPU", NON_FENCING_XIDS.get(number, "")
                logger.warning(
                    "driver reported Xid %d for %s%s", number, gpus, kept and f", which stays in use ({kept})"
                )
            case NvmlMissingEvent(reason):
                self.stop()
                self._absence = reason
                self._log_absence()
        self._publish_changes()

    def _check_limits(self) -> None:
        """Warn of each worker once that has more memory than its limit and a CUDA context explain."""
        limited = {link: one for link, one in self._workers.items() if one.limit_nbytes}
        taken = dict(self.process_memory()) if limited else {}
        for link, one in limited.items():
            if taken.get(one.pid, 0) > one.limit_nbytes + _BESIDE_LIMIT_NBYTES:
                self._workers[link] = one._replace(limit_nbytes=0)
                logger.warning(
                    "model %s: process %d has %d bytes on its GPU, and gpu_memory_nbytes is %d: the limit "
                    "holds for CuPy and PyTorch, and other libraries and the CUDA context come on top",
                    *(one.model[0], one.pid, taken[one.pid], one.limit_nbytes),
                )

    def _log_absence(self) -> None:
        if self._absence:
            level = logging.WARNING if self._has_models else logging.DEBUG
            logger.log(level, "GPUs are not monitored: %s", self._absence)

    def _on_timer(self) -> None:
        self._check_age(time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._on_timer)

    def _check_age(self, now: float) -> bool:
        """Update the states, and return whether the readings are too old, which needs a monitor."""
        if self._monitor is None:
            return False
        self._gpus.check_age(now)
        self._publish_changes()
        return self._gpus.is_stale(now)

    def _publish_changes(self) -> None:
        before, self._states = self._states, self._gpus.states()
        if self._states == before:
            return
        for gpu in self._gpus:
            if self._states[gpu.uuid] is not before.get(gpu.uuid, GpuState.HEALTHY):
                _log(gpu.device or gpu.uuid, gpu.uuid, self._states[gpu.uuid], gpu.reason)
        lost = self._gpus.lost()
        if lost != self._reported_lost:
            self._reported_lost = lost
            self._on_lost(lost)
        if self._monitor is not None:
            self._monitor.is_gpu_lost = bool(lost)
        self._on_change()


def _log(device: str, uuid: str, state: GpuState, reason: str) -> None:
    match state:
        case GpuState.LOST:
            logger.error("GPU %s (%s) is lost: %s", device, uuid, reason)
        case GpuState.SUSPECT:
            logger.warning("GPU %s (%s) is suspect: NVML does not answer", device, uuid)
        case GpuState.HEALTHY:
            logger.info("GPU %s (%s) recovered", device, uuid)


#: Field of a ``GpuReading``, Triton's name after "nv_" ("" for none), our name after "gpuserve_gpu_", and
#: help text. Names with "_total" are counters, others gauges.
_FIGURES: Final = (
    ("utilization", "gpu_utilization", "utilization_ratio", "Part of the time that the GPU worked, 0 to 1"),
    ("memory_total_nbytes", "gpu_memory_total_bytes", "memory_total_bytes", "Memory of the GPU in bytes"),
    ("memory_used_nbytes", "gpu_memory_used_bytes", "memory_used_bytes", "Memory of the GPU in use in bytes"),
    ("power_w", "gpu_power_usage", "power_watts", "Power that the GPU draws in watts"),
    ("power_limit_w", "gpu_power_limit", "power_limit_watts", "Power that the GPU may draw in watts"),
    ("energy_j", "energy_consumption", "energy_joules_total",
     "Energy that the GPU has used in joules, since its driver was loaded"),
    ("temperature_c", "", "temperature_celsius", "Temperature of the GPU in degrees Celsius"),
    ("retired_pages_pending", "", "retired_pages_pending",
     "1 while pages of the GPU's memory are to be retired at its next reset"),
    ("remapped_rows.pending", "", "row_remap_pending",
     "1 while rows of the GPU's memory are to be replaced at its next reset"),
    ("remapped_rows.failed", "", "row_remap_failed",
     "1 where a row of the GPU's memory could not be replaced"),
)  # fmt: skip


class ModelGpuMemory(NamedTuple):
    """The memory of one model version's workers on one GPU."""

    model: str
    version: str
    uuid: str
    device: str
    nbytes: int


def gpu_families(
    gpus: Iterable[WatchedGpu], models: Iterable[ModelGpuMemory], age_s: float
) -> Iterator[Family]:
    """Yield the metrics of all GPUs. ``age_s`` is the age of the NVML readings."""
    gpus = list(gpus)
    readings = [(one, one.reading) for one in gpus if one.reading is not None]
    for path, at_triton, here, text in _FIGURES:
        kind = "counter" if here.endswith("_total") else "gauge"
        values = [
            (one, value) for one, reading in readings if (value := _reading_value(reading, path)) is not None
        ]
        if at_triton:
            found = [({"gpu_uuid": one.uuid}, value) for one, value in values]
            yield family(f"nv_{at_triton}", kind, text, found)
        yield family(f"gpuserve_gpu_{here}", kind, text, [(_labels(one), value) for one, value in values])
    for name, label, kind, text, parts in _BY_LABEL:
        counts = [
            ({**_labels(one), label: part}, n) for one in gpus for part, n in parts(one) if n is not None
        ]
        yield family(f"gpuserve_gpu_{name}", kind, text, counts)
    text = "Seconds since NVML last answered"
    yield family("gpuserve_gpu_reading_age_seconds", "gauge", text, [({}, age_s)] if gpus else [])
    memory = [
        ({"model": one.model, "version": one.version, "gpu_uuid": one.uuid, "device": one.device}, one.nbytes)
        for one in models
    ]
    text = "Memory that the model's workers have on the GPU in bytes"
    yield family("gpuserve_model_gpu_memory_bytes", "gauge", text, memory)


def _reading_value(reading: GpuReading, path: str) -> float | None:
    found: Any = reading
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return int(found) if isinstance(found, bool) else found


def _labels(gpu: WatchedGpu) -> dict[str, str]:
    return {"gpu_uuid": gpu.uuid, "device": gpu.device}


_Parts: TypeAlias = Iterable[tuple[str, float | None]]


def _states(gpu: WatchedGpu) -> _Parts:
    return [(state.value.lower(), int(gpu.state is state)) for state in GpuState]


def _ecc_errors(gpu: WatchedGpu) -> _Parts:
    one = gpu.reading
    return [] if one is None else [("corrected", one.ecc_corrected), ("uncorrected", one.ecc_uncorrected)]


def _slowdowns(gpu: WatchedGpu) -> _Parts:
    now = None if gpu.reading is None else gpu.reading.slowdowns
    return [] if now is None else [(reason, int(reason in now)) for reason in SLOWDOWNS.values()]


def _remapped_rows(gpu: WatchedGpu) -> _Parts:
    rows = None if gpu.reading is None else gpu.reading.remapped_rows
    return [] if rows is None else [("corrected", rows.corrected), ("uncorrected", rows.uncorrected)]


#: Metrics with several values a GPU: name after "gpuserve_gpu_", label, kind, help text, and values.
_BY_LABEL: Final[Sequence[tuple[str, str, str, str, Callable[[WatchedGpu], _Parts]]]] = (
    ("state", "state", "gauge", "1 for the state that the GPU is in, 0 for the others", _states),
    ("ecc_errors_total", "kind", "counter", "Errors of the GPU's memory since its driver was loaded",
     _ecc_errors),
    ("remapped_rows", "kind", "gauge", "Rows of the GPU's memory that were replaced, by the kind of error",
     _remapped_rows),
    ("slowdown", "reason", "gauge", "1 while the GPU runs slower than it could, for this reason", _slowdowns),
    ("xid_errors_total", "xid", "counter", "Errors that the GPU's driver reported, by their Xid",
     lambda gpu: [(str(number), count) for number, count in sorted(gpu.xids.items())]),
)  # fmt: skip


# ---- JSON ---------------------------------------------------------------------------------------


def gpus_document(
    gpus: Iterable[WatchedGpu], models: Iterable[ModelGpuMemory], age_s: float, stale: bool
) -> dict[str, Any]:
    """Return the body of ``GET /v2/gpus``. Unreported values are null; ``age_s`` is the readings' age."""
    memory = list(models)
    return {
        "stale": stale,
        "age_seconds": None if math.isinf(age_s) else round(age_s, 3),
        "gpus": [_gpu_document(one, [each for each in memory if each.uuid == one.uuid]) for one in gpus],
    }


def _gpu_document(gpu: WatchedGpu, models: Iterable[ModelGpuMemory]) -> dict[str, Any]:
    return {
        "uuid": gpu.uuid,
        "device": gpu.device,
        "name": gpu.product,
        "state": gpu.state.value,
        "reason": gpu.reason,
        "reading": _reading_document(gpu),
        "xid_errors": {str(number): count for number, count in sorted(gpu.xids.items())},
        "models": [{"name": one.model, "version": one.version, "memory_bytes": one.nbytes} for one in models],
    }


def _reading_document(gpu: WatchedGpu) -> dict[str, Any] | None:
    one = gpu.reading
    if one is None:
        return None
    return {
        "memory_total_bytes": one.memory_total_nbytes,
        "memory_used_bytes": one.memory_used_nbytes,
        "utilization": one.utilization,
        "temperature_celsius": one.temperature_c,
        "power_watts": one.power_w,
        "power_limit_watts": one.power_limit_w,
        "energy_joules": one.energy_j,
        "ecc_errors_corrected": one.ecc_corrected,
        "ecc_errors_uncorrected": one.ecc_uncorrected,
        "remapped_rows": None if one.remapped_rows is None else one.remapped_rows._asdict(),
        "retired_pages_pending": one.retired_pages_pending,
        "slowdowns": None if one.slowdowns is None else sorted(one.slowdowns),
    }
