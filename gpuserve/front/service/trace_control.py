"""Tracing as the rest of the front sees it: the settings that clients change, and what follows from them.
Tracers and receptions are there only while something is traced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from gpuserve.config.settings.checks import lacks_trace_file
from gpuserve.config.settings.server import TRACE, TraceSettings
from gpuserve.core.errors import InvalidArgument
from gpuserve.front.models.interface import Driver
from gpuserve.front.models.model_tracer import ModelTracer, trace_ids
from gpuserve.front.models.watching import RequestWatcher, watched_by
from gpuserve.front.observe.tracing.reception import Receptions
from gpuserve.front.observe.tracing.scopes import TraceScopes
from gpuserve.front.observe.tracing.sink import TraceSink, TraceWriter
from gpuserve.front.observe.tracing.trace import Trace
from gpuserve.front.observe.tracing.trace_file import TraceFileWriter
from gpuserve.front.observe.tracing.values import OPENTELEMETRY, Changes, described, read_changes
from gpuserve.front.service.control import Say
from gpuserve.front.service.model_table import ModelTable
from gpuserve.front.v2.health import Watchers
from gpuserve.front.v2.limits import shown
from gpuserve.supervisor.control import front_messages as messages

#: What waits to be written when the front ends has so long; less than the supervisor's patience.
CLOSE_TIMEOUT_S: Final = 2.0


class TraceControl:
    """The tracing of one front. ``models`` are those that it has now; ``refresh`` is to follow any change.
    ``receptions`` note when calls are received and sent while anything is traced. The supervisor is told the
    settings that a client has changed, for a successor.
    ``notes`` is told of the requests of every model, traced or not.
    """

    def __init__(
        self,
        models: ModelTable,
        start: TraceSettings,
        epoch: int,
        say: Say,
        notes: RequestWatcher | None = None,
    ) -> None:
        self.receptions = Receptions()
        self._models = models
        self._start = start
        self._epoch = epoch
        self._say = say
        self._notes = notes
        self._scopes = TraceScopes(self._start)
        self._known: set[str] = set()
        self._ids = trace_ids(epoch)
        self._watchers = Watchers()
        self._sink: TraceSink | None = None
        #: Sinks that only write what they have, and the files that this front has written.
        self._ending: set[asyncio.Task[None]] = set()
        self._written: set[str] = set()

    def settings(self, model: str = "") -> dict[str, list[str]]:
        """All settings of a model ("": the server): lists of texts by name; or InvalidArgument."""
        self._check_model(model)
        return described(self._scopes.values(model), self._start)

    def update(self, model: str, changes: Changes) -> dict[str, list[str]]:
        """Change settings of a model ("": the server); all of them. Where it raises, none is changed."""
        self._check_model(model)
        if changes:
            self._scopes.update(model, read_changes(changes))
            self.refresh()
            self._say(messages.Changed(TRACE, self._scopes.to_wire()))
        return self.settings(model)

    def restore(self, wire: Mapping[str, Any]) -> None:
        self._scopes.restore(wire)
        self.refresh()

    def restart(self, start: TraceSettings) -> None:
        """Go by other settings of the start. What clients have changed stays over them."""
        former, self._start = self._start, start
        changes = self._scopes.to_wire()
        self._scopes = TraceScopes(start)
        self._scopes.restore(changes)
        if self._sink is not None and _output(former) != _output(start):
            ending = asyncio.get_running_loop().create_task(_close(self._sink))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            self._sink = None
        self.refresh()

    def refresh(self) -> None:
        """Let every model be traced as its settings say. The settings of one that is no more go with it."""
        drivers = self._models.all()
        names = {driver.spec.name for driver in drivers}
        for gone in self._known - names:
            self._scopes.forget(gone)
        self._known = names
        active = False
        for driver in drivers:
            tracer = self._tracer(driver)
            driver.tracer = watched_by(tracer, self._notes)
            active |= tracer is not None
        was_active, self.receptions.deliver = self.is_active, self._deliver if active else None
        if self.is_active is not was_active:
            self._watchers.changed()

    @property
    def is_active(self) -> bool:
        """Whether requests may be traced."""
        return self.receptions.deliver is not None

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once requests may be traced, or none is any more. Call the result to end it."""
        return self._watchers.watch(callback)

    async def close(self) -> None:
        """Write the traces that wait, for two seconds at most."""
        ending = [*self._ending, *([_close(self._sink)] if self._sink is not None else ())]
        await asyncio.gather(*ending)

    def _check_model(self, model: str) -> None:
        if model and all(driver.spec.name != model for driver in self._models.all()):
            raise InvalidArgument(f"Request for unknown model : {shown(model)}")

    def _tracer(self, driver: Driver) -> ModelTracer | None:
        name = driver.spec.name
        values = self._scopes.values(name)
        if not values.level or values.problem(self._start) is not None:
            return None
        return ModelTracer(
            driver.spec,
            self._scopes.sampler(name),
            name if self._scopes.is_own(name) else "",
            self._ids,
            self._deliver,
            follows_callers=self._start.mode == OPENTELEMETRY,
        )

    def _deliver(self, trace: Trace) -> None:
        if lacks_trace_file(self._start.mode, True, self._start.file):
            return  # there was one when its request began
        if self._sink is None:
            continues = self._epoch > 1 or self._start.file in self._written
            self._written.add(self._start.file)
            self._sink = TraceSink(partial(_writer, self._start, continues))
            self._sink.open()
        self._sink.put(trace)


def _writer(start: TraceSettings, continues: bool) -> TraceWriter:
    if start.mode != OPENTELEMETRY:
        return TraceFileWriter(start.file, continues=continues)
    from gpuserve.front.observe.tracing.otlp import OtlpWriter  # an extra, which only this mode needs

    return OtlpWriter(start)


def _output(start: TraceSettings) -> tuple[object, ...]:
    """The settings that decide where traces go."""
    return start.mode, start.file, start.url, start.resource


async def _close(sink: TraceSink) -> None:
    await asyncio.to_thread(sink.close, CLOSE_TIMEOUT_S)
