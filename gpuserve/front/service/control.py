"""Control of the server by clients and operators: requests to the supervisor, log settings, model loading,
and tracing.

The supervisor loads models and runs operators' verbs, and decides whether a verb's arguments are valid.
Tracers and trace records exist only while something is traced.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

from gpuserve.config.settings import logs
from gpuserve.config.settings.checks import lacks_trace_file
from gpuserve.config.settings.logs import LOG, LogSettings
from gpuserve.config.settings.server import TRACE, TraceSettings
from gpuserve.core.errors import InvalidArgument, RequestError, Unavailable, Unimplemented, request_error
from gpuserve.front.models.model_tracer import ModelTracer, trace_ids
from gpuserve.front.models.pending_request import AccessLogObserver
from gpuserve.front.net.exchange import Exchange
from gpuserve.front.observability.tracing.request_trace import Reception, Receptions, Trace
from gpuserve.front.observability.tracing.trace_settings import (
    OPENTELEMETRY,
    Changes,
    TraceScopes,
    described,
    read_changes,
)
from gpuserve.front.observability.tracing.trace_writers import TraceFileWriter, TraceSink, TraceWriter
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.requests.limits import shown
from gpuserve.front.requests.server_status import HealthSubscribers
from gpuserve.front.service.model_table import ModelTable
from gpuserve.model.spec import ModelSpec, ensemble_members
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.control.operator_protocol import VerbOutcome

logger = logging.getLogger(__name__)

#: Sends a message of ``control.messages`` to the supervisor.
NotifySupervisor: TypeAlias = Callable[[tuple[Any, ...]], None]

EXPLICIT: Final = "explicit"
_FILE: Final = "file:"


class SupervisorRequests:
    """Requests to the supervisor, each with a ticket until its response arrives."""

    def __init__(self, notify_supervisor: NotifySupervisor) -> None:
        self._notify_supervisor = notify_supervisor
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[VerbOutcome]] = {}

    async def ask(self, request_type: Callable[..., tuple[Any, ...]], *arguments: Any) -> VerbOutcome:
        """Send ``request(ticket, *arguments)``, return the outcome. Cancelling stops nothing that started."""
        ticket = next(self._tickets)
        self._waiting[ticket] = waiting = asyncio.get_running_loop().create_future()
        self._notify_supervisor(request_type(ticket, *arguments))
        try:
            outcome: VerbOutcome = await waiting
        finally:
            self._waiting.pop(ticket, None)
        return outcome

    def complete(self, ticket: int, outcome: VerbOutcome) -> None:
        waiting = self._waiting.pop(ticket, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(outcome)


class LogControl:
    """The log settings of this process. The supervisor is notified of changes by clients."""

    def __init__(self, settings: LogSettings, notify_supervisor: NotifySupervisor) -> None:
        self.settings = settings
        self._notify_supervisor = notify_supervisor
        self._subscribers: list[Callable[[LogSettings], None]] = []

    def subscribe(self, on_change: Callable[[LogSettings], None]) -> None:
        """Call ``on_change`` with the settings now and after each change, for another process."""
        self._subscribers.append(on_change)
        on_change(self.settings)

    def update(self, changes: Mapping[str, Any]) -> LogSettings:
        """Change some fields to checked values, and return all settings."""
        if changes:
            self.restore(changes)
            self._notify_supervisor(messages.Changed(LOG, self.settings._asdict()))
        return self.settings

    def restore(self, wire: Mapping[str, Any]) -> None:
        """Apply the settings that clients had changed at an earlier front."""
        self.settings = self.settings._replace(**wire)
        logs.adjust(self.settings)
        for on_change in self._subscribers:
            on_change(self.settings)


class AdminControl:
    """Operators' verbs over HTTP. Without ``is_open`` there is no admin API."""

    def __init__(self, supervisor_requests: SupervisorRequests, *, is_open: bool) -> None:
        self._supervisor_requests = supervisor_requests
        self.is_open = is_open

    async def ask(self, verb: str, arguments: dict[str, Any]) -> VerbOutcome:
        """Return the supervisor's outcome. Raise Unimplemented if there is no admin API."""
        if not self.is_open:
            raise Unimplemented("this server has no admin API; the setting admin_api opens it")
        return await self._supervisor_requests.ask(messages.Operate, verb, arguments)


class RepositoryControl:
    """Loading and unloading of ``models`` for clients, allowed only if ``mode`` is "explicit"."""

    def __init__(self, mode: str, supervisor_requests: SupervisorRequests, models: ModelTable) -> None:
        self.mode = mode
        self._supervisor_requests = supervisor_requests
        self._models = models

    async def load(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Load a model, changed by the JSON text "config", until served. Raises ``RequestError``."""
        self._check_allowed(model)
        changes = self._changes(model, parameters)
        await self._ask(messages.LoadModel, model, changes)

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Unload all versions of a model, until its workers have exited. Raises ``RequestError``."""
        self._check_allowed(model)
        for key, value in parameters.items():
            if key != "unload_dependents":
                raise InvalidArgument(f"unrecognized unload parameter '{shown(key)}'.")
            if not isinstance(value, bool):
                raise InvalidArgument(
                    "invalid value type for 'unload_dependents' parameter, expected bool_param."
                )
        for one in self.unloaded_with(model, parameters):
            await self._ask(messages.UnloadModel, one)

    def unloaded_with(self, model: str, parameters: Mapping[str, Any]) -> list[str]:
        """Return the models that an unload with these parameters concerns."""
        read, and_steps = self._models.specs, parameters.get("unload_dependents")
        return [model, *(ensemble_members(model, read) if and_steps else ())]

    async def _ask(self, request_type: Callable[..., tuple[Any, ...]], *arguments: Any) -> None:
        outcome = await self._supervisor_requests.ask(request_type, *arguments)
        if outcome.code:
            raise request_error(outcome.code, outcome.text)

    def _check_allowed(self, model: str) -> None:
        if self.mode != EXPLICIT:
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")
        if not model:
            raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
        if "/" in model or "\\" in model or ".." in model:
            raise InvalidArgument(
                f"invalid model name '{shown(model)}', model name must not contain path traversal characters"
            )

    def _changes(self, model: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in parameters.items():
            if key != "config" and not key.startswith(_FILE):
                raise InvalidArgument(f"unrecognized load parameter '{shown(key)}'.")
            expected, kind = (str, "string_param") if key == "config" else (bytes, "bytes_param")
            if not isinstance(value, expected):
                wrong = f"invalid value type for load parameter '{shown(key)}', expected {kind}."
                raise InvalidArgument(wrong)
        if any(key.startswith(_FILE) for key in parameters):
            logger.warning(
                "model %s: rejected load request with files: clients cannot upload files", shown(model)
            )
            raise InvalidArgument(_cannot_poll(model))
        text = parameters.get("config")
        if text is None:
            return {}
        # protobuf's JSON support is imported only when it is used.
        from gpuserve.front.requests.config_override import BadOverride, read_override

        try:
            return read_override(model, text, self._models.specs(model))
        except BadOverride as error:
            logger.error("Invalid config override: %s", error)
            raise InvalidArgument(f"{_cannot_poll(model)}: Invalid config override: {error}") from None


def _cannot_poll(model: str) -> str:
    return f"failed to load '{shown(model)}', failed to poll from model repository"


# ---- tracing -------------------------------------------------------------------------------------

#: Time to write pending traces when the front ends; less than the supervisor's timeout.
CLOSE_TIMEOUT_S: Final = 2.0


class TraceControl:
    """The tracing of one front.

    ``models`` are the current models; call ``refresh`` after any change of them. ``receptions`` records when
    calls are received and sent while anything is traced. The supervisor is notified of settings that clients
    change, for a successor. With ``has_notes`` the requests of every model are noted for the access log.
    """

    def __init__(
        self,
        models: ModelTable,
        start: TraceSettings,
        epoch: int,
        notify_supervisor: NotifySupervisor,
        has_notes: bool = False,
    ) -> None:
        self.receptions = Receptions()
        self._models = models
        self._start = start
        self._epoch = epoch
        self._notify_supervisor = notify_supervisor
        self._has_notes = has_notes
        self._scopes = TraceScopes(self._start)
        self._known: set[str] = set()
        self._ids = trace_ids(epoch)
        self._live: set[int] = set()
        self._watchers = HealthSubscribers()
        self._sink: TraceSink | None = None
        #: Sinks that only write what is queued, and the files that this front has written.
        self._ending: set[asyncio.Task[None]] = set()
        self._written: set[str] = set()

    def settings(self, model: str = "") -> dict[str, list[str]]:
        """Return all settings of a model ("": the server). Raise InvalidArgument if it is unknown."""
        self._check_model(model)
        return described(self._scopes.values(model), self._start)

    def update(self, model: str, changes: Changes) -> dict[str, list[str]]:
        """Change settings of a model ("": the server), and return all. If this raises, nothing is changed."""
        self._check_model(model)
        if changes:
            self._scopes.update(model, read_changes(changes))
            self.refresh()
            self._notify_supervisor(messages.Changed(TRACE, self._scopes.to_wire()))
        return self.settings(model)

    def restore(self, wire: Mapping[str, Any]) -> None:
        self._scopes.restore(wire)
        self.refresh()

    def restart(self, start: TraceSettings) -> None:
        """Use other start settings. Changes by clients stay in force."""
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
        """Update the tracer of every model. Settings of removed models are dropped."""
        drivers = self._models.all()
        names = {driver.spec.name for driver in drivers}
        for gone in self._known - names:
            self._scopes.forget(gone)
        self._known = names
        active = False
        for driver in drivers:
            tracer = self._tracer(driver.spec)
            driver.tracer = AccessLogObserver(tracer) if self._has_notes else tracer
            driver.metrics.keeps_exemplars = tracer is not None and self._start.mode == OPENTELEMETRY
            active |= tracer is not None
        was_active, self.receptions.deliver = self.is_active, self._deliver if active else None
        if self.is_active is not was_active:
            self._watchers.changed()

    @property
    def is_active(self) -> bool:
        """Return whether requests may be traced."""
        return self.receptions.deliver is not None

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` when tracing starts or stops. Returns a function that ends the subscription."""
        return self._watchers.watch(callback)

    def on_unread(
        self, name: str, error: RequestError, exchange: Exchange | None, reception: Reception
    ) -> None:
        """Trace a request that no model receives, if it is sampled: of an unknown model, or malformed.

        Args:
            name: The model that the request names; "" if that could not be read.
            error: The reason of the refusal.
            exchange: The call of the request, if it is one of this process.
            reception: The record of the call.
        """
        unknown = ModelSpec(shown(name) or "?", (), (), version=0)
        spec = next((one.spec for one in self._models.all() if one.spec.name == name), unknown)
        tracer = self._tracer(spec)
        if tracer is not None:
            request = InferRequest(name, "", "", {}, [], (), None)
            request.sender, request.reception = exchange, reception
            tracer.on_refused(request, error, None)

    async def close(self) -> None:
        """Write pending traces, for two seconds at most."""
        ending = [*self._ending, *([_close(self._sink)] if self._sink is not None else ())]
        await asyncio.gather(*ending)

    def _check_model(self, model: str) -> None:
        if model and all(driver.spec.name != model for driver in self._models.all()):
            raise InvalidArgument(f"Request for unknown model : {shown(model)}")

    def _tracer(self, spec: ModelSpec) -> ModelTracer | None:
        name = spec.name
        values = self._scopes.values(name)
        if not values.level or values.problem(self._start) is not None:
            return None
        return ModelTracer(
            spec,
            self._scopes.sampler(name),
            name if self._scopes.is_own(name) else "",
            self._ids,
            self._live,
            self._deliver,
            follows_callers=self._start.mode == OPENTELEMETRY,
        )

    def _deliver(self, trace: Trace) -> None:
        if lacks_trace_file(self._start.mode, True, self._start.file):
            return  # a file was set when this request started
        if self._sink is None:
            continues = self._epoch > 1 or self._start.file in self._written
            self._written.add(self._start.file)
            self._sink = TraceSink(partial(_writer, self._start, continues))
            self._sink.open()
        self._sink.put(trace)


def _writer(start: TraceSettings, continues: bool) -> TraceWriter:
    if start.mode != OPENTELEMETRY:
        return TraceFileWriter(start.file, continues=continues)
    from gpuserve.front.observability.otlp import OtlpWriter  # an extra, which only this mode needs

    return OtlpWriter(start)


def _output(start: TraceSettings) -> tuple[object, ...]:
    """Return the settings that decide where traces go."""
    return start.mode, start.file, start.url, start.resource


async def _close(sink: TraceSink) -> None:
    await asyncio.to_thread(sink.close, CLOSE_TIMEOUT_S)
