"""Tracing as the rest of the front sees it: the settings that clients ask for and change, and what follows
from them. Tracers are put on the drivers, and receptions around the doors, only while something is traced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from gpuserve.errors import InvalidArgument
from gpuserve.front.driver import Driver
from gpuserve.front.endpoint.limits import shown
from gpuserve.front.tracing.model_tracer import ModelTracer, trace_ids
from gpuserve.front.tracing.reception import Deliver
from gpuserve.front.tracing.scopes import TraceScopes
from gpuserve.front.tracing.sink import TraceSink, TraceWriter
from gpuserve.front.tracing.trace import Trace
from gpuserve.front.tracing.trace_file import TraceFileWriter
from gpuserve.front.tracing.values import OPENTELEMETRY, Changes, described, read_changes
from gpuserve.settings import TraceSettings

#: What waits to be written when the front ends has so long; less than the supervisor's patience.
CLOSE_TIMEOUT_S: Final = 2.0


class TraceControl:
    """The tracing of one front. ``models`` are those that it has now; ``refresh`` is to follow any change.

    ``on_switch`` is given what takes finished traces once anything is traced, and None when nothing is any
    more; ``on_changed`` the settings that a client has changed, for a successor.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[Driver]],
        start: TraceSettings | None = None,
        epoch: int = 1,
        on_switch: Callable[[Deliver | None], None] = lambda _: None,
        on_changed: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._models = models
        self._start = start or TraceSettings()
        self._epoch = epoch
        self._on_switch = on_switch
        self._on_changed = on_changed
        self._scopes = TraceScopes(self._start)
        self._known: set[str] = set()
        self._ids = trace_ids(epoch)
        self._sink: TraceSink | None = None
        self._active = False

    def settings(self, model: str = "") -> dict[str, list[str]]:
        """All settings of a model, "" for the server's: a list of texts for each name.

        Raises:
            InvalidArgument: there is no such model.
        """
        self._check_model(model)
        return described(self._scopes.values(model), self._start)

    def update(self, model: str, changes: Changes) -> dict[str, list[str]]:
        """Change some, and answer all.

        Raises:
            InvalidArgument: there is no such model, or a value cannot be. Nothing is changed then.
            Unimplemented: the trace file is not for clients to choose.
        """
        self._check_model(model)
        if changes:
            self._scopes.update(model, read_changes(changes))
            self.refresh()
            self._on_changed(self._scopes.to_wire())
        return self.settings(model)

    def restore(self, wire: Mapping[str, Any]) -> None:
        """Take over what clients had changed at an earlier front."""
        self._scopes.restore(wire)
        self.refresh()

    def refresh(self) -> None:
        """Let every model be traced as its settings say. The settings of one that is no more go with it."""
        drivers = list(self._models())
        names = {driver.spec.name for driver in drivers}
        for gone in self._known - names:
            self._scopes.forget(gone)
        self._known = names
        for driver in drivers:
            driver.tracer = self._tracer(driver)
        active = any(driver.tracer is not None for driver in drivers)
        if active is not self._active:
            self._active = active
            self._on_switch(self._deliver if active else None)

    async def close(self) -> None:
        """Write what is not written yet."""
        if self._sink is not None:
            await asyncio.to_thread(self._sink.close, CLOSE_TIMEOUT_S)

    def _check_model(self, model: str) -> None:
        if model and all(driver.spec.name != model for driver in self._models()):
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
        if self._sink is None:
            self._sink = TraceSink(self._writer)
            self._sink.open()
        self._sink.put(trace)

    def _writer(self) -> TraceWriter:
        if self._start.mode != OPENTELEMETRY:
            return TraceFileWriter(self._start.file, continues=self._epoch > 1)
        from gpuserve.front.tracing.otlp import OtlpWriter  # an extra, which only this mode needs

        return OtlpWriter(self._start)
