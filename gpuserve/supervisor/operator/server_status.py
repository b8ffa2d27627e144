"""The verb ``status``: a census of the front, and the status document made from it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.core.version import VERSION
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.attach.attached_programs import AttachedModel, AttachedModels
from gpuserve.supervisor.control.front_messages import INGRESS_FIELDS, Census, RequestCensus
from gpuserve.supervisor.control.operator_protocol import OnOutcome, VerbOutcome
from gpuserve.supervisor.models.generations import GenerationTable, Residence
from gpuserve.supervisor.operator.quiescence import Quiescence
from gpuserve.supervisor.processes.lifecycle import InstanceState
from gpuserve.supervisor.processes.server_core import ServerCore
from gpuserve.supervisor.workers.worker_monitor import WorkerMonitor

CENSUS_TIMEOUT_S: Final = 2.0
#: The state of an instance that is READY but being retired.
_LEAVING: Final = "LEAVING"
_PAGE_NBYTES: Final = os.sysconf("SC_PAGE_SIZE")
_NO_CENSUS: Final = Census(0, False, (), (), ())
#: Receives the census, or None if the front does not answer.
OnCensus: TypeAlias = Callable[[Census | None], None]


class FrontCensus:
    """Queries to the front for its counts and states, with a timeout."""

    def __init__(self, core: ServerCore) -> None:
        self._core = core
        self._tickets = itertools.count(1)
        self._waiting: dict[int, OnCensus] = {}

    def ask(self, on_census: OnCensus) -> None:
        """Request a census. ``on_census`` is called once, within ``CENSUS_TIMEOUT_S``."""
        if not self._core.front.ready:
            on_census(None)
            return
        ticket = next(self._tickets)
        self._waiting[ticket] = on_census
        self._core.front.send(RequestCensus(ticket))
        self._core.reactor.call_later(CENSUS_TIMEOUT_S, lambda: self.answer(ticket, None))

    def answer(self, ticket: int, census: Census | None) -> None:
        if (on_census := self._waiting.pop(ticket, None)) is not None:
            on_census(census)


@dataclass(eq=False)
class OperatorStatus:
    """The verb ``status``. ``config`` is the path of the server's config file, or "" if there is none."""

    _core: ServerCore
    _census: FrontCensus
    _table: GenerationTable
    _attached: AttachedModels
    _quiescence: Quiescence
    _config: str
    _memory: Callable[[], dict[str, Any]]

    def __post_init__(self) -> None:
        if self._config:  # clients may run in other folders
            self._config = str(Path(self._config).absolute())
        self._made_at = time.monotonic()

    def ask(self, answer: OnOutcome) -> None:
        self._census.ask(lambda census: answer(VerbOutcome("", "", self.document(census))))

    def document(self, census: Census | None) -> dict[str, Any]:
        """Return the status document. ``census`` is None if the front does not answer."""
        sources = StatusSources(
            "config" if self._config else f"program {os.getpid()}",
            self._table.names(),
            self._table.specs(),
            self._table.workers(),
            tuple(self._attached.served()),
            census,
            self._table.leaving(),
            {(one.spec.name, one.spec.version): one.residence.value for one in self._table.on_demand()},
        )
        weights = self._table.shared_weights()
        models = {"models": model_rows(sources), "weights": weights, "memory": self._memory()}
        return {"server": self._server(census), **models}

    def _server(self, census: Census | None) -> dict[str, Any]:
        settings, front = self._core.settings.current, self._core.front
        return {
            "name": settings.name,
            "version": VERSION,
            "pid": os.getpid(),
            "state": self._core.lifecycle.state.value,
            "service": self._quiescence.state.value,
            "ready": census is not None and census.ready,
            "uptime_s": round(time.monotonic() - self._made_at, 3),
            "addresses": self._core.listeners.addresses(settings),
            "front": {
                "pid": None if front.process is None else front.process.pid,
                "restarts": front.restarts,
                "answers": census is not None,
            },
            "doors": [dict(zip(INGRESS_FIELDS, one, strict=True)) for one in (census or _NO_CENSUS).ingress],
            "config": self._config,
            "mps": self._core.mps.text,
        }


#: The states of instances with which a model is ready: sleeping ones wake for a request.
_SERVED: Final = {InstanceState.READY.value, InstanceState.ASLEEP.value}


class StatusSources(NamedTuple):
    """The sources of the status rows. ``own`` is the origin of the server's own models. ``census`` is None if
    the front does not answer. ``leaving`` workers are being retired. ``residences`` are those of models with
    ``on_demand``.
    """

    own: str
    names: Iterable[str]
    specs: Iterable[ModelSpec]
    workers: Iterable[WorkerMonitor]
    attached: Iterable[tuple[int, AttachedModel]]
    census: Census | None
    leaving: Collection[WorkerMonitor] = ()
    residences: Mapping[tuple[str, int], str] = {}


class _VersionLoad(NamedTuple):
    queued: int = 0
    in_flight: int = 0
    slots: int = 0
    saturation: float | None = None


#: The load of a version if the front does not answer.
_UNKNOWN: Final[dict[str, None]] = dict.fromkeys(_VersionLoad._fields)


def model_rows(sources: StatusSources) -> list[dict[str, Any]]:
    """Return one row for each version of each model, and one for each model that is not loaded."""
    loads = _loads(sources.census or _NO_CENSUS)
    instances = _instances(sources)
    programs = {model.spec.name: f"program {pid}" for pid, model in sources.attached}
    rows = []
    for (name, version), (state, reason) in sorted(_states(sources, instances).items()):
        load = _UNKNOWN if sources.census is None else loads.get((name, version), _VersionLoad())._asdict()
        about = {"name": name, "version": version, "state": state, "reason": reason}
        about["residence"] = sources.residences.get((name, version))
        source = programs.get(name, sources.own)
        rows.append({**about, "source": source, "instances": instances.get((name, version), []), **load})
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
    sources: StatusSources, instances: Mapping[tuple[str, int], list[dict[str, Any]]]
) -> dict[tuple[str, int], tuple[str, str]]:
    """Return state and reason by (model, version), from the front, or else from the states of the workers."""
    if sources.census is not None:
        found = {
            (name, int(version or 0)): (state or "UNAVAILABLE", reason or ("" if state else "not loaded"))
            for name, version, state, reason in sources.census.states
        }
    else:
        found = {(name, 0): ("UNAVAILABLE", "not loaded") for name in sources.names}
        cold = {key for key, residence in sources.residences.items() if residence == Residence.COLD.value}
        for spec in [*sources.specs, *(model.spec for _, model in sources.attached)]:
            found.pop((spec.name, 0), None)
            states = {one["state"] for one in instances.get((spec.name, spec.version), [])}
            if states & _SERVED or not states or (spec.name, spec.version) in cold:
                found[spec.name, spec.version] = ("READY", "")
            elif InstanceState.LOADING.value in states:
                found[spec.name, spec.version] = ("LOADING", "")
            else:
                found[spec.name, spec.version] = ("UNAVAILABLE", "no live instance")
    return found


def _instances(sources: StatusSources) -> dict[tuple[str, int], list[dict[str, Any]]]:
    gpu_memory = dict((sources.census or _NO_CENSUS).gpu_memory)
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for worker in sources.workers:
        is_finishing = worker.lifecycle.state is InstanceState.READY and worker in sources.leaving
        state = _LEAVING if is_finishing else worker.lifecycle.state.value
        pids = [one.process.pid for one in worker.children]
        row = _instance_row(worker.instance, state, pids, worker.lifecycle.restarts, gpu_memory)
        row["threads"] = worker.threads
        found[worker.spec.name, worker.spec.version].append(row)
    for _, model in sources.attached:
        alive = {one.name: [one.pid] for one in model.live.values()}
        for one in model.spec.instances:
            state = (InstanceState.READY if one.name in alive else InstanceState.DOWN).value
            # Only the attached program knows how often it has restarted the instance.
            row = _instance_row(one, state, alive.get(one.name, []), None, gpu_memory)
            found[model.spec.name, model.spec.version].append(row)
    return found


def _instance_row(
    instance: InstanceSpec,
    state: str,
    pids: Sequence[int],
    restarts: int | None,
    gpu_memory: Mapping[int, int],
) -> dict[str, Any]:
    """Return the row of an instance, with the bytes that its processes hold on the host and on GPUs.
    ``pid`` is that of rank 0.
    """
    row: dict[str, Any] = {"name": instance.name, "device": instance.device, "state": state}
    row |= {"pid": pids[0] if pids else None, "restarts": restarts}
    if instance.ranks > 1:
        row |= {"ranks": instance.ranks, "pids": list(pids)}
    if pids:
        with contextlib.suppress(OSError, ValueError, IndexError):  # a process may have just ended
            pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
            row["memory_nbytes"] = sum(pages) * _PAGE_NBYTES
        if on_gpus := [gpu_memory[pid] for pid in pids if pid in gpu_memory]:
            row["gpu_memory_nbytes"] = sum(on_gpus)
    return row
