"""The verb ``status``: asks the front for what only it knows, and puts the answer together as plain data."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.control.messages import Census, TakeCensus
from gpuserve.control.operator import AnswerOutcome, VerbOutcome
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.attach.attached_models import AttachedModels
from gpuserve.supervisor.attach.attached_program import AttachedModel
from gpuserve.supervisor.core.life import InstanceState
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.models.generations import GenerationTable
from gpuserve.supervisor.operator.quiescence import Quiescence
from gpuserve.supervisor.workers.worker_keeper import WorkerKeeper
from gpuserve.version import VERSION

CENSUS_TIMEOUT_S: Final = 2.0
#: In place of READY, of an instance that finishes what it has.
_LEAVING: Final = "LEAVING"
_PAGE_NBYTES: Final = os.sysconf("SC_PAGE_SIZE")
_NO_CENSUS: Final = Census(0, False, (), (), ())
#: What is known of a door, in the order of ``Census.doors``.
_DOOR: Final = ("number", "pid", "state", "connections", "requests", "cpu_s", "restarts")
#: Takes the answer of the front; None where it gives none.
TakeAnswer: TypeAlias = Callable[[Census | None], None]


class FrontCensus:
    """Asks the front what only it knows. A front that does not answer is not waited for."""

    def __init__(self, core: ServerCore) -> None:
        self._core = core
        self._tickets = itertools.count(1)
        self._waiting: dict[int, TakeAnswer] = {}

    def ask(self, take: TakeAnswer) -> None:
        """Ask the front, and be answered once, within ``CENSUS_TIMEOUT_S``."""
        if not self._core.front.ready:
            take(None)
            return
        ticket = next(self._tickets)
        self._waiting[ticket] = take
        self._core.front.send(TakeCensus(ticket))
        self._core.reactor.call_later(CENSUS_TIMEOUT_S, lambda: self.answer(ticket, None))

    def answer(self, ticket: int, census: Census | None) -> None:
        take = self._waiting.pop(ticket, None)
        if take is not None:
            take(census)


class OperatorStatus:
    """The answers to ``status``. ``config`` is the path of the server's config file, "" where it has none."""

    def __init__(
        self,
        core: ServerCore,
        census: FrontCensus,
        table: GenerationTable,
        attached: AttachedModels,
        quiescence: Quiescence,
        config: str,
    ) -> None:
        self._core = core
        self._census = census
        self._table = table
        self._attached = attached
        self._quiescence = quiescence
        self._config = str(Path(config).absolute()) if config else ""  # a client may be anywhere
        self._made_at = time.monotonic()

    def ask(self, answer: AnswerOutcome) -> None:
        self._census.ask(lambda census: answer(VerbOutcome("", "", self.document(census))))

    def document(self, census: Census | None) -> dict[str, Any]:
        """Put the status together, with what the front says, or None where it says nothing."""
        known = Knowledge(
            "config" if self._config else f"program {os.getpid()}",
            self._table.names(),
            self._table.specs(),
            self._table.workers(),
            tuple(self._attached.served()),
            census,
            self._table.leaving(),
        )
        return {"server": self._server(census), "models": model_rows(known)}

    def _server(self, census: Census | None) -> dict[str, Any]:
        settings, front = self._core.settings.now, self._core.front
        return {
            "name": settings.name,
            "version": VERSION,
            "pid": os.getpid(),
            "state": self._core.life.state.value,
            "service": self._quiescence.state.value,
            "ready": census is not None and census.ready,
            "uptime_s": round(time.monotonic() - self._made_at, 3),
            "addresses": self._core.listeners.addresses(settings),
            "front": {
                "pid": None if front.process is None else front.process.pid,
                "restarts": front.restarts,
                "answers": census is not None,
            },
            "doors": [dict(zip(_DOOR, one, strict=True)) for one in (census or _NO_CENSUS).doors],
            "config": self._config,
        }


# ---- rows -----------------------------------------------------------------------------------


class Knowledge(NamedTuple):
    """What the rows of the status are made of. ``own`` is where the server's own models come from; ``census``
    is None where the front does not answer. ``leaving`` workers get nothing new, and end when they have
    finished.
    """

    own: str
    names: Iterable[str]
    specs: Iterable[ModelSpec]
    workers: Iterable[WorkerKeeper]
    attached: Iterable[tuple[int, AttachedModel]]
    census: Census | None
    leaving: Collection[WorkerKeeper] = ()


class _VersionLoad(NamedTuple):
    queued: int = 0
    in_flight: int = 0
    slots: int = 0
    saturation: float | None = None


#: Where the front does not say it.
_UNKNOWN: Final[dict[str, None]] = dict.fromkeys(_VersionLoad._fields)


def model_rows(known: Knowledge) -> list[dict[str, Any]]:
    """Make one row for each version of each model, and one for each model that is not loaded."""
    loads = _loads(known.census or _NO_CENSUS)
    instances = _instances(known)
    sources = {model.spec.name: f"program {pid}" for pid, model in known.attached}
    rows = []
    for (name, version), (state, reason) in sorted(_states(known, instances).items()):
        load = _UNKNOWN if known.census is None else loads.get((name, version), _VersionLoad())._asdict()
        rows.append(
            {
                "name": name,
                "version": version,
                "state": state,
                "reason": reason,
                "source": sources.get(name, known.own),
                "instances": instances.get((name, version), []),
                **load,
            }
        )
    return rows


def _loads(census: Census) -> Mapping[tuple[str, int], _VersionLoad]:
    found: dict[tuple[str, int], _VersionLoad] = defaultdict(_VersionLoad)
    for name, version, queued, in_flight, slots, saturation in census.counts:
        so_far = found[name, version]
        found[name, version] = _VersionLoad(
            so_far.queued + queued,
            so_far.in_flight + in_flight,
            so_far.slots + slots,
            so_far.saturation if saturation is None else saturation,
        )
    return found


def _states(
    known: Knowledge, instances: Mapping[tuple[str, int], list[dict[str, Any]]]
) -> dict[tuple[str, int], tuple[str, str]]:
    """Return state and reason by (model, version): of the front, else by what is known of the workers."""
    if known.census is not None:
        found = {
            (name, int(version or 0)): (state or "UNAVAILABLE", reason or ("" if state else "not loaded"))
            for name, version, state, reason in known.census.states
        }
    else:
        found = {(name, 0): ("UNAVAILABLE", "not loaded") for name in known.names}
        for spec in [*known.specs, *(model.spec for _, model in known.attached)]:
            found.pop((spec.name, 0), None)
            found[spec.name, spec.version] = _state_by_instances(instances.get((spec.name, spec.version), []))
    return found


def _state_by_instances(instances: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    states = {one["state"] for one in instances}
    if InstanceState.READY.value in states or not states:
        return "READY", ""
    if InstanceState.LOADING.value in states:
        return "LOADING", ""
    return "UNAVAILABLE", "no live instance"


def _instances(known: Knowledge) -> dict[tuple[str, int], list[dict[str, Any]]]:
    gpu_memory = dict((known.census or _NO_CENSUS).gpu_memory)
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for worker in known.workers:
        is_finishing = worker.life.state is InstanceState.READY and worker in known.leaving
        state = _LEAVING if is_finishing else worker.life.state.value
        pid = None if worker.process is None else worker.process.pid
        row = _instance_row(worker.instance, state, pid, worker.life.restarts, gpu_memory)
        found[worker.spec.name, worker.spec.version].append(row)
    for _, model in known.attached:
        pids = {one.name: one.pid for one in model.live()}
        for one in model.spec.instances:
            state = (InstanceState.READY if one.name in pids else InstanceState.DOWN).value
            # How often its program restarted it, only that program knows.
            row = _instance_row(one, state, pids.get(one.name), None, gpu_memory)
            found[model.spec.name, model.spec.version].append(row)
    return found


def _instance_row(
    instance: InstanceSpec, state: str, pid: int | None, restarts: int | None, gpu_memory: Mapping[int, int]
) -> dict[str, Any]:
    """Make the row of an instance, with the bytes that it has in memory and on GPUs, where they are known."""
    row = {"name": instance.name, "device": instance.device, "state": state, "pid": pid, "restarts": restarts}
    if pid is not None:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
            row["memory_nbytes"] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_NBYTES
        if pid in gpu_memory:
            row["gpu_memory_nbytes"] = gpu_memory[pid]
    return row
