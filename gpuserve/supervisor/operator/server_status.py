"""What ``gpuserve status`` shows: from what the supervisor and its front know to plain data. Nothing is asked
or started here.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuserve.spec import ModelSpec
from gpuserve.supervisor.attached_program import AttachedModel
from gpuserve.supervisor.life import InstanceState
from gpuserve.supervisor.messages import Census
from gpuserve.supervisor.worker_keeper import WorkerKeeper

#: In place of READY, of an instance that finishes what it has.
_LEAVING: Final = "LEAVING"
_PAGE_NBYTES: Final = os.sysconf("SC_PAGE_SIZE")
_NO_CENSUS: Final = Census(0, False, (), (), ())


class Knowledge(NamedTuple):
    """What the rows are made of. ``own`` is where the server's own models come from; ``census`` is None where
    the front does not answer. ``leaving`` workers get nothing new, and end when they have finished.
    """

    own: str
    names: Iterable[str]
    specs: Iterable[ModelSpec]
    workers: Iterable[WorkerKeeper]
    attached: Iterable[tuple[int, AttachedModel]]
    census: Census | None
    leaving: Collection[WorkerKeeper] = ()


class _Load(NamedTuple):
    """What waits and runs for a version."""

    queued: int = 0
    in_flight: int = 0
    slots: int = 0
    saturation: float | None = None


#: Where the front does not say it.
_UNKNOWN: Final[dict[str, None]] = dict.fromkeys(_Load._fields)


def model_rows(known: Knowledge) -> list[dict[str, Any]]:
    """One row for each version of each model, and one for each model that is not loaded."""
    loads = _loads(known.census or _NO_CENSUS)
    instances = _instances(known)
    sources = {model.spec.name: f"program {pid}" for pid, model in known.attached}
    rows = []
    for (name, version), (state, reason) in sorted(_states(known, instances).items()):
        load = _UNKNOWN if known.census is None else loads.get((name, version), _Load())._asdict()
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


def _loads(census: Census) -> Mapping[tuple[str, int], _Load]:
    """Of all generations of a version together."""
    found: dict[tuple[str, int], _Load] = defaultdict(_Load)
    for name, version, queued, in_flight, slots, saturation in census.counts:
        so_far = found[name, version]
        found[name, version] = _Load(
            so_far.queued + queued,
            so_far.in_flight + in_flight,
            so_far.slots + slots,
            so_far.saturation if saturation is None else saturation,
        )
    return found


def _states(
    known: Knowledge, instances: Mapping[tuple[str, int], list[dict[str, Any]]]
) -> dict[tuple[str, int], tuple[str, str]]:
    """State and reason by model and version, as the front says, else by what is known of the workers."""
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
    """The instances of each version, of all its generations."""
    gpu_memory = dict((known.census or _NO_CENSUS).gpu_memory)
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for worker in known.workers:
        pid = None if worker.process is None else worker.process.pid
        is_finishing = worker.life.state is InstanceState.READY and worker in known.leaving
        row = {
            "name": worker.instance.name,
            "device": worker.instance.device,
            "state": _LEAVING if is_finishing else worker.life.state.value,
            "pid": pid,
            "restarts": worker.life.restarts,
        }
        found[worker.spec.name, worker.spec.version].append({**row, **_memory(pid, gpu_memory)})
    for _, model in known.attached:
        found[model.spec.name, model.spec.version] += _attached_instances(model, gpu_memory)
    return found


def _attached_instances(model: AttachedModel, gpu_memory: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """How often its program has started them, only that program knows."""
    pids = {one.name: one.pid for one in model.live()}
    for one in model.spec.instances:
        pid = pids.get(one.name)
        state = InstanceState.DOWN if pid is None else InstanceState.READY
        row = {"name": one.name, "device": one.device, "state": state.value, "pid": pid, "restarts": None}
        yield {**row, **_memory(pid, gpu_memory)}


def _memory(pid: int | None, gpu_memory: Mapping[int, int]) -> dict[str, int]:
    """What its process has in memory, and on GPUs where the driver tells; nothing where it is not known."""
    found: dict[str, int] = {}
    if pid is None:
        return found
    with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
        found["memory_nbytes"] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_NBYTES
    if pid in gpu_memory:
        found["gpu_memory_nbytes"] = gpu_memory[pid]
    return found
