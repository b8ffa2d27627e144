"""A whole run, from a target and data to the figures: what ``gpuserve bench`` and ``gpuserve tune`` share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuserve.bench.control import connect
from gpuserve.bench.fleet import Fleet
from gpuserve.bench.latencies import histogram_type
from gpuserve.bench.levels import LoadKind
from gpuserve.bench.payloads import Tensors
from gpuserve.bench.plan import Plan, SharedMemory
from gpuserve.bench.preparation import (
    Data,
    check_memory,
    place_tensors,
    request_arrays,
    require_answer,
    setup,
)
from gpuserve.bench.regions import Regions
from gpuserve.bench.results import LevelResult
from gpuserve.bench.session import Observer, Session
from gpuserve.bench.target import Target


@dataclass(frozen=True)
class Run:
    """What is measured and how."""

    target: Target
    data: Data
    plan: Plan
    memory: SharedMemory = SharedMemory.NONE


@dataclass(frozen=True)
class Outcome:
    """The levels that are through; ``interrupted`` by Ctrl-C before the last of them."""

    levels: tuple[LevelResult, ...]
    interrupted: bool


def measure(
    run: Run, observer: Observer, until: Callable[[Sequence[LevelResult]], bool] = lambda _results: False
) -> Outcome:
    """Measure the levels of a plan, or until there are results enough.

    Raises:
        BenchOptionError: an option does not go with the model.
        BenchError: the server cannot be loaded.
        MissingPackage: a package of the extra ``bench`` is not installed.
    """
    histogram_type()
    with contextlib.ExitStack() as stack:
        control = connect(run.target)
        stack.callback(control.close)
        model = control.metadata()
        check_memory(run.target, model, run.memory)
        requests = [Tensors(arrays) for arrays in request_arrays(model, run.data)]
        if run.memory is not SharedMemory.NONE:
            regions = stack.enter_context(Regions(run.memory, control))
            arrays = [dict(one.arrays) for one in requests]
            requests = place_tensors(control, run.target, model, arrays, regions, _most_in_flight(run.plan))
        require_answer(control, run.target, model, requests)
        session = Session(run.plan, control, observer)
        interrupted = False
        fleet = Fleet(setup(run.target, model, requests, run.plan), run.plan, run.target.url.protocol)
        try:
            asyncio.run(_run(fleet, session, until))
        except KeyboardInterrupt:
            interrupted = True
        return Outcome(tuple(session.results), interrupted)


async def _run(fleet: Fleet, session: Session, until: Callable[[Sequence[LevelResult]], bool]) -> None:
    async with fleet:
        await session.run(fleet, until)


def _most_in_flight(plan: Plan) -> int:
    rates = [one for one in plan.levels if one.kind is LoadKind.RATE]
    return plan.max_in_flight if rates else int(max(one.value for one in plan.levels))
