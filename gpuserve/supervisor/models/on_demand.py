"""Models with ``on_demand``: their instances start or wake for waiting requests, and end or go to sleep for
others or when idle.

The front reports how each of these models is used (``Usage``): once a second, ten times a second while a cold
model has requests, and at once when a cold model gets its first request. So a report that is lost with a
front, or crosses a decision, is made up for by the next. To evict a model, the supervisor asks the front to
take its instances out of rotation, and stops them when the front has done so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Set
from typing import Any, Final

from gpuserve.core.event_log import EventKind
from gpuserve.devices.names import CPU
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.models.generations import (
    Generation,
    GenerationState,
    GenerationTable,
    Residence,
)
from gpuserve.supervisor.models.memory_policy import Nbytes, Plan, Resident, Use, plan_start
from gpuserve.supervisor.models.model_memory import ModelMemory
from gpuserve.supervisor.processes.server_core import ServerCore
from gpuserve.supervisor.workers.worker_group import stop_timeout_s
from gpuserve.supervisor.workers.worker_monitor import WorkerMonitor

logger = logging.getLogger(__name__)

#: While no model is idle, a cold model waits this long before a model in use gives way, after its running
#: requests. A model that has just been loaded stays for as long, or for as long as it took to load. A model
#: counts as used for as long as it took to load, but no longer than this, after its latest request: otherwise
#: models in steady use would be loaded in turn between their requests.
GIVE_WAY_S: Final = 2.0
#: The states of models that will be loaded or awake, and of those whose memory gets free.
_COMING: Final = {Residence.STARTING, Residence.WAKING}
_GOING: Final = {Residence.DRAINING, Residence.SUSPENDING, Residence.STOPPING}
#: Reasons of evictions.
IDLE: Final = "idle"
MEMORY: Final = "memory"
_REASONS: Final = {IDLE: "no request came within idle_timeout_s", MEMORY: "other models need the memory"}


class OnDemandModels:
    """The models that come and go. ``is_changing`` returns whether an operation on a model is running."""

    def __init__(self, core: ServerCore, table: GenerationTable, is_changing: Callable[[str], bool]) -> None:
        self._core = core
        self._table = table
        self._is_changing = is_changing
        #: The generations that are to start, and since when, in this order.
        self._wanted: dict[Generation, float] = {}
        self._memory = ModelMemory(core.settings, table)
        self._shown: messages.ResidentMemory | None = None

    def want(self, generation: Generation) -> None:
        """Start the instances of a cold generation, at once or as soon as there is memory for them."""
        self._wanted.setdefault(generation, time.monotonic())
        self.advance()

    def document(self) -> dict[str, Any]:
        """Return the budgets and the bytes that are taken, by device, for the server status."""
        limits = self._memory.limits()
        free = self._memory.free(limits)
        return {one: {"limit_nbytes": limit, "nbytes": limit - free[one]} for one, limit in limits.items()}

    # ---- events -------------------------------------------------------------------------------

    def on_usage(self, usage: messages.Usage) -> None:
        """Note how the models are used, and act on it."""
        now, waiting = time.monotonic(), set()
        for number, idle_s, unfinished in usage.models:
            generation = self._table.get(number)
            if generation is None or not generation.spec.on_demand:
                continue
            generation.used_at, generation.is_used = now - idle_s, unfinished > 0
            if unfinished and generation.residence is not Residence.RESIDENT:
                waiting.add(generation)
        for one in [one for one in self._wanted if one not in waiting and not one.is_loading]:
            del self._wanted[one]  # its requests were cancelled, or their deadlines have expired
        for one in waiting:
            self._wanted.setdefault(one, now)
        self._memory.measure(dict(usage.gpu_memory))
        self.advance()
        limits = self._memory.limits()
        timeouts_s = {one.number: one.spec.idle_timeout_s for one in self._table.on_demand()}
        for idle in [one for one in self._residents(_is_used, limits) if one.use is Use.IDLE]:
            if 0 < timeouts_s[idle.key] <= now - idle.used_at:
                self._evict(idle.key, IDLE, sleeps=self._has_room_asleep(idle, limits))
        residents = sorted(self._residents(_is_used, limits), key=lambda one: one.used_at)
        # The latest used may exceed a limit alone.
        self._evict_all(plan_start({}, self._memory.free(limits), residents[:-1]))
        self._show_memory()

    def worker_ready(self, generation: Generation) -> None:
        """Note that an instance is loaded or awake."""
        if generation.residence in _COMING and generation.group.is_loaded:
            generation.move_to(Residence.RESIDENT)
            now = generation.used_at = time.monotonic()
            generation.load_s, generation.resident_at = now - generation.resident_at, now
            self._memory.measure({})
            self.advance()
            if generation.is_loading:
                return  # the end of the operation is recorded
            spec, load_s = generation.spec, round(generation.load_s, 3)
            about: dict[str, Any] = {"model": spec.name, "version": spec.version}
            count = len(spec.instances)
            self._core.events.record(EventKind.MODEL_LOADED, **about, instances=count, load_s=load_s)

    def worker_lost(self, generation: Generation) -> bool:
        """Note that a worker has ended. Return whether it was to end."""
        if generation.residence in _COMING:  # it starts again, unless another model goes first
            generation.move_to(Residence.RESIDENT)
        elif generation.residence in {Residence.DRAINING, Residence.SUSPENDING, Residence.ASLEEP}:
            self._stop(generation)
            return True
        if generation.residence is not Residence.STOPPING:
            return False
        self._check_stopped(generation)
        return True

    def worker_slept(self, worker: WorkerMonitor) -> None:
        """Note that an instance sleeps."""
        generation = self._table.get(worker.generation)
        if generation is None or generation.residence is not Residence.SUSPENDING:
            return  # it ends
        if not all(one.has_slept for one in generation.group.workers):
            return
        generation.move_to(Residence.ASLEEP)
        name, version, reason = generation.spec.name, generation.spec.version, generation.evicted_for
        logger.info("model %s: put its instances to sleep: %s", name, _REASONS[reason])
        self._core.events.record(EventKind.MODEL_ASLEEP, model=name, version=version, reason=reason)
        self._memory.measure({})
        self.advance()

    def on_asleep(self, number: int, *, is_asleep: bool) -> None:
        """Stop the workers of a model that the front has taken out of rotation, or let them sleep, unless the
        model is in use again.
        """
        generation = self._table.get(number)
        if generation is None or generation.residence is not Residence.DRAINING:
            return
        if is_asleep and generation.keeps_processes and generation.group.can_sleep:
            generation.move_to(Residence.SUSPENDING)
            for worker in generation.group.workers:
                worker.sleep()
        elif is_asleep:
            self._stop(generation)
        else:
            generation.move_to(Residence.RESIDENT)
            generation.used_at, generation.is_used = time.monotonic(), True
            self.advance()

    def front_lost(self) -> None:
        """Leave in place the models that the dead front was asked to take out of rotation."""
        self._shown = None
        for generation in self._table.on_demand():
            if generation.residence is Residence.DRAINING:
                generation.move_to(Residence.RESIDENT)

    # ---- decisions ----------------------------------------------------------------------------

    def advance(self) -> None:
        """Start the models that are to start and for which there is memory, and evict others for them."""
        limits = self._memory.limits()
        free = self._memory.free(limits)
        found: dict[Callable[[Generation], bool], list[Resident]] = {}

        def residents(is_held: Callable[[Generation], bool]) -> list[Resident]:
            if is_held not in found:
                found[is_held] = self._residents(is_held, limits)
            return found[is_held]

        blocked: list[Set[str]] = []  # the devices of each model for which even evictions do not suffice
        is_measuring = any(
            one.residence is Residence.STARTING and self._memory.is_guess(one)
            for one in self._table.on_demand()
        )
        for generation, since in self._waiting():
            wanted: Nbytes = self._memory.nbytes(generation, limits)
            if generation.residence is Residence.ASLEEP:
                asleep = self._memory.asleep_nbytes(generation)
                wanted = {device: max(0, nbytes - asleep[device]) for device, nbytes in wanted.items()}
            concerned = {device for device, nbytes in wanted.items() if nbytes}
            # What earlier models lack on other devices does not hold up this one.
            left = {
                device: nbytes if device in concerned else max(0, nbytes) for device, nbytes in free.items()
            }
            for device in concerned:  # a model that waits keeps its place before those that came later
                free[device] -= wanted[device]
            if any(devices <= concerned for devices in blocked):
                continue  # for the earlier model alone nothing suffices
            plan = _plan(wanted, left, since, generation.number, residents)
            if not plan.suffices:
                blocked.append(concerned)
            is_guess = bool(limits) and self._memory.is_guess(generation)
            if is_guess and is_measuring:
                plan = Plan(False)  # models of unknown size are measured one after the other
            self._evict_all(plan)
            if plan.starts:
                is_measuring |= is_guess
                self._start(generation)
            if plan.starts or plan.evicted or plan.asleep:
                found.clear()

    def _waiting(self) -> Iterator[tuple[Generation, float]]:
        """Yield the models that are to start or to wake, and since when they are."""
        for generation, since in list(self._wanted.items()):
            if generation not in self._table or generation.state is GenerationState.STOPPING:
                self._wanted.pop(generation, None)
            elif generation.residence in {Residence.COLD, Residence.ASLEEP}:
                yield generation, since

    def _start(self, generation: Generation) -> None:
        self._wanted.pop(generation, None)
        generation.resident_at = time.monotonic()
        if generation.residence is Residence.ASLEEP:
            generation.move_to(Residence.WAKING)
            for worker in generation.group.workers:
                worker.wake()
        else:
            generation.move_to(Residence.STARTING)
            generation.group.start_or_retry()

    def _residents(self, is_held: Callable[[Generation], bool], limits: Nbytes) -> list[Resident]:
        found = []
        for one in self._table.on_demand():
            # While both generations of a model run, a reload may exceed the limits.
            if one.residence is Residence.COLD or self._is_changing(one.spec.name):
                continue
            use, nbytes, asleep = Use.IDLE, self._memory.taken(one, limits), None
            if one.residence in _GOING or one.is_retiring:
                use = Use.LEAVING
                if one.keeps_processes and one.residence is not Residence.STOPPING:
                    kept = self._memory.asleep_nbytes(one)
                    nbytes = {device: nbytes[device] - kept[device] for device in nbytes}
            elif one.residence is Residence.ASLEEP:
                use = Use.ASLEEP
            elif one.residence in _COMING or is_held(one):
                use = Use.HELD
            elif one.group.can_sleep:
                asleep = self._memory.asleep_nbytes(one)
            found.append(Resident(one.number, nbytes, one.used_at, use, asleep))
        return found

    def _has_room_asleep(self, one: Resident, limits: Nbytes) -> bool:
        """Return whether a model can sleep within the budget of the host."""
        if one.asleep is None:
            return False
        growth_nbytes = one.asleep.get(CPU, 0) - one.nbytes.get(CPU, 0)
        return growth_nbytes <= self._memory.free(limits).get(CPU, growth_nbytes)

    def _evict_all(self, plan: Plan) -> None:
        for key in plan.evicted:
            self._evict(key, MEMORY, sleeps=False)
        for key in plan.asleep:
            self._evict(key, MEMORY, sleeps=True)

    def _evict(self, number: int, reason: str, *, sleeps: bool) -> None:
        """Ask the front to take a model out of rotation: if it is in use, after its running requests. A model
        that sleeps already ends at once.
        """
        generation = self._table.get(number)
        assert generation is not None, "the plan was made of this table"
        generation.evicted_for, generation.keeps_processes = reason, sleeps
        if generation.residence is Residence.ASLEEP:
            self._stop(generation)
            return
        generation.move_to(Residence.DRAINING)
        if self._core.front.process is None:  # no request is in flight
            self._stop(generation)
        else:
            self._core.front.send(messages.Sleep(number, reason, generation.is_used, sleeps))

    def _stop(self, generation: Generation) -> None:
        generation.move_to(Residence.STOPPING)
        generation.group.stop()
        for worker in generation.group.workers:
            self._core.reactor.call_later(stop_timeout_s(hurried=False), worker.kill)
        self._check_stopped(generation)

    def _check_stopped(self, generation: Generation) -> None:
        if not generation.group.is_stopped:
            return
        generation.group.close()
        generation.group.renew(generation.spec)
        generation.move_to(Residence.COLD)
        # The front may not have been asked, or a worker may have started again in between.
        self._core.front.send(messages.Sleep(generation.number, "", False))
        name, version, reason = generation.spec.name, generation.spec.version, generation.evicted_for
        logger.info("model %s: ended its instances: %s", name, _REASONS[reason])
        self._core.events.record(EventKind.MODEL_EVICTED, model=name, version=version, reason=reason)
        self.advance()

    def _show_memory(self) -> None:
        """Send the front the memory of the resident models if it has changed."""
        limits = self._memory.limits()
        shown = messages.ResidentMemory(
            tuple(
                (one.spec.name, one.spec.version, device, nbytes)
                for one in self._table.on_demand()
                if one.residence is not Residence.COLD
                for device, nbytes in self._memory.taken(one, limits).items()
            ),
            tuple(
                (one.spec.name, one.spec.version)
                for one in self._table.on_demand()
                if one.residence is Residence.ASLEEP
            ),
        )
        if shown != self._shown:
            self._shown = shown
            self._core.front.send(shown)


def _plan(
    wanted: Nbytes,
    free: Nbytes,
    since: float,
    number: int,
    residents: Callable[[Callable[[Generation], bool]], list[Resident]],
) -> Plan:
    """Return the plan for the model ``number``, which waits since ``since``. ``residents`` returns the
    resident models by a rule that says which of them are held.
    """
    plan = plan_start(wanted, free, [one for one in residents(_is_used) if one.key != number])
    if plan.suffices or time.monotonic() - since < GIVE_WAY_S:
        return plan
    return plan_start(wanted, free, [one for one in residents(_must_stay) if one.key != number])


def _must_stay(generation: Generation) -> bool:
    resident_s = time.monotonic() - generation.resident_at
    return _is_used(generation) and resident_s < max(GIVE_WAY_S, generation.load_s)


def _is_used(generation: Generation) -> bool:
    idle_s = time.monotonic() - generation.used_at
    return generation.is_used or idle_s < min(generation.load_s, GIVE_WAY_S)
