"""Reload of the config while the server runs. ``ConfigReload`` compares the present file with the models and
settings that were applied last, and applies the differences: settings first, because loads depend on them,
then the models (``ConfigRun``). Requests that arrive during a reload are answered by the next. A model that
fails keeps its earlier state, and the next reload tries it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from gpuserve.config.settings.checks import SettingRefusal, compare_settings, describe_change, key_of
from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import Code, DeviceError, GpuserveError, InvalidArgument, RequestError
from gpuserve.core.event_log import EventKind, EventLog
from gpuserve.devices.names import AUTO
from gpuserve.model.placement import ServerDevices
from gpuserve.model.spec import ModelSpec, ensemble_members
from gpuserve.supervisor.attach.attached_programs import AttachedModels
from gpuserve.supervisor.control.operator_protocol import OnOutcome, OnProgress, VerbOutcome, failed
from gpuserve.supervisor.models.declared_models import (
    ConfigSource,
    loaded_at_start,
)
from gpuserve.supervisor.models.model_operations import (
    LoadOperation,
    OnDone,
    ResizeOperation,
    UnloadOperation,
    failed_version,
)
from gpuserve.supervisor.models.served_models import ServedModels
from gpuserve.supervisor.processes.lifecycle import ServerLifecycle, ServerState
from gpuserve.supervisor.processes.server_core import refuse_change
from gpuserve.supervisor.reload.config_changes import (
    Action,
    ConfigModels,
    actions,
    by_name,
    even_count,
    needs,
)

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration


logger = logging.getLogger(__name__)

NO_FILE: Final = "this server has no config file that could be read again; its models can be loaded by name"
_NO_MODELS: Final = ConfigModels({}, frozenset())
_RESULT_KEYS: Final = (*(action.value for action in Action), "settings", "refused", "failed")
_LOG_LINE: Final = "config reload: %s"
NOTHING: Final = "nothing has changed"

#: Makes a call in a background thread, and passes its result, or the error that refuses the change, to a
#: callback.
RunInBackground: TypeAlias = Callable[[Callable[[], Any], Callable[[Any], None]], None]


class _ReloadRequest(NamedTuple):
    """A request for a reload. ``is_by_files``: files have changed, and nobody asked for the reload."""

    answer: OnOutcome
    progress: OnProgress
    is_by_files: bool = False


@dataclass(eq=False)
class ConfigReload:
    """One server's reloads of ``source`` (None: no file). ``adjust`` applies changed settings by name."""

    _source: ConfigSource | None
    _lifecycle: ServerLifecycle
    _events: EventLog
    _work: ConfigWork
    _adjust: Callable[[dict[str, Any]], None]
    _run_in_background: RunInBackground

    def __post_init__(self) -> None:
        source = self._source
        #: Held during a read: only one runs at a time.
        self._read_lock = threading.Lock()
        self._settings = ServerSettings() if source is None else source.start.settings
        self._models = AppliedModels(_NO_MODELS if source is None else _models(source.start, self._settings))
        #: True while a reload is reading the file, or running.
        self._is_busy = False
        self._started_at = 0.0
        self._run: ConfigRun | None = None
        #: The requests that the next reload answers.
        self._requests: list[_ReloadRequest] = []
        #: The models whose last declaration was broken.
        self._broken: frozenset[str] = frozenset(() if source is None else source.start.broken)
        #: The models whose files have changed since the last reload started.
        self._touched: set[str] = set()
        #: True if a signal asked for a reload while the server was starting.
        self._is_signal_pending = False

    @property
    def path(self) -> str:
        return "" if self._source is None else self._source.path

    # ---- requests -------------------------------------------------------------------------

    def request(self, answer: OnOutcome, progress: OnProgress) -> None:
        self._queue(_ReloadRequest(answer, progress))

    def request_by_signal(self) -> None:
        """Reload on SIGHUP, once the server has started. The result is only logged."""
        if self._lifecycle.state is ServerState.STARTING:
            self._is_signal_pending = True
        else:
            self.request(partial(_log_refusal, "SIGHUP"), lambda _: None)

    def request_by_files(self, models: Collection[str], answer: OnOutcome) -> None:
        """Reload because files of these models have changed, and cancel loads of the earlier files."""
        self._touched.update(models)
        if self._run is not None:
            self._run.cancel(models)
        self._queue(_ReloadRequest(answer, lambda _: None, is_by_files=True))

    def request_all(self) -> None:
        """Reload every model of the config, changed or not, for an operator."""
        self._touched.update(self._models.snapshot().declared)
        self._queue(_ReloadRequest(partial(_log_refusal, "reload"), lambda _: None))

    def server_started(self) -> None:
        """Reload if a signal came while the server was starting."""
        if self._is_signal_pending:
            self._is_signal_pending = False
            self.request_by_signal()

    def model_loaded(self, model: str, specs: Sequence[ModelSpec]) -> None:
        """Note that a model was loaded by its name, with this declaration."""
        self._models.set_declared(model, specs)

    def _queue(self, request: _ReloadRequest) -> None:
        refusal = InvalidArgument(NO_FILE) if self._source is None else self._lifecycle.change_refusal()
        if refusal is not None:
            request.answer(failed(refusal))
            return
        self._requests.append(request)
        if not self._is_busy:
            self._start_next()
            return
        ran_s = time.monotonic() - self._started_at
        request.progress(f"a reload has been running for {ran_s:.1f} s; this one begins when that is over")
        if (run := self._run) is not None:

            def cancel_outdated(now: Configuration | GpuserveError) -> None:
                # An error of the file is reported by the next reload.
                if run is self._run and not isinstance(now, GpuserveError):
                    run.cancel_outdated(_models(now, self._settings))

            self._read(cancel_outdated)

    # ---- one reload -----------------------------------------------------------------------

    def _start_next(self) -> None:
        self._is_busy, self._started_at = True, time.monotonic()
        requests, self._requests = self._requests, []
        touched, self._touched = self._touched, set()
        changed = touched if all(request.is_by_files for request in requests) else None
        self._read(lambda now: self._on_read(requests, touched, now), changed)

    def _read(
        self, then: Callable[[Configuration | GpuserveError], None], changed: Collection[str] | None = None
    ) -> None:
        source = self._source
        assert source is not None

        def read() -> Configuration | GpuserveError:
            with self._read_lock:
                return source.read_all(changed)

        self._run_in_background(read, then)

    def _on_read(
        self, requests: Sequence[_ReloadRequest], touched: set[str], now: Configuration | GpuserveError
    ) -> None:
        if (refusal := self._lifecycle.change_refusal()) is not None:
            self._end(requests, failed(refusal))
        elif isinstance(now, GpuserveError):
            logger.error("the config is not reloaded, and nothing has changed:\n%s", now)
            self._touched.update(touched)  # the next reload has to deal with these files
            self._end(requests, VerbOutcome(Code.INVALID_ARGUMENT.value, str(now), ConfigReport().result))
        else:
            try:
                self._apply(requests, touched, now)
            except Exception as error:
                self._touched.update(touched)
                outcome = failed(refuse_change("the reload of the config", error), ConfigReport().result)
                self._end(requests, outcome)

    def _apply(self, requests: Sequence[_ReloadRequest], touched: set[str], now: Configuration) -> None:
        def on_progress(line: str) -> None:
            for request in requests:
                request.progress(line)

        def on_end() -> None:
            if self._run is run:  # else the reload was refused meanwhile
                self._end(requests, report.outcome())

        report = ConfigReport(on_progress)
        self._change_settings(now, report)
        servable, refusal = self._servable(now, report), self._lifecycle.change_refusal
        touched = touched.difference(now.broken)
        self._run = run = ConfigRun(self._work, self._models, servable, report, refusal, on_end, touched)
        run.start()

    def _servable(self, now: Configuration, report: ConfigReport) -> ConfigModels:
        """Return the models to be served. A broken declaration is replaced by the earlier one."""
        models, before = _models(now, self._settings), self._models.snapshot()
        for name, reason in now.broken.items():
            report.failed(name, str(reason))
            self._work.undeclared(name, str(reason))
        gone = self._broken.difference(now.broken, models.declared)
        self._broken = frozenset(now.broken)
        self._work.names_changed(sorted(gone))
        kept = {name: before.declared[name] for name in now.broken if name in before.declared}
        return ConfigModels(
            {**models.declared, **kept},
            {*models.wanted, *(one for one in now.broken if one in before.wanted)},
        )

    def _change_settings(self, now: Configuration, report: ConfigReport) -> None:
        change = compare_settings(self._settings, now.settings)
        before = self._settings
        if change.changed:
            self._adjust({name: getattr(change.settings, name) for name in change.changed})
        self._settings = change.settings
        for name in change.changed:
            report.setting(name, describe_change(name, before, change.settings))
        for refusal in change.refused:
            report.refused(refusal)

    def _end(self, requests: Sequence[_ReloadRequest], outcome: VerbOutcome) -> None:
        self._run, self._is_busy = None, False
        changes = {name: what for name, what in outcome.result.items() if what}
        reason = outcome.text if outcome.code else ""
        self._events.record(EventKind.CONFIG_RELOADED, ok=not reason, reason=reason, changes=changes)
        for request in requests:
            request.answer(outcome)
        if self._requests and not self._is_busy:
            self._start_next()


def _models(declaration: Configuration, settings: ServerSettings) -> ConfigModels:
    loaded = loaded_at_start(declaration.models, settings.load_at_start)
    return ConfigModels(by_name(declaration.models), frozenset(one.name for one in loaded))


def _log_refusal(what: str, outcome: VerbOutcome) -> None:
    """Log a refusal. Everything else in an outcome has been logged already."""
    if not outcome.result:
        logger.warning("%s: %s", what, outcome.text)


class ConfigReport:
    """The result of one reload, with a log line for each part. ``progress`` is called with each change."""

    def __init__(self, progress: OnProgress = lambda _: None) -> None:
        self.result: dict[str, list[Any]] = {key: [] for key in _RESULT_KEYS}
        self._progress = progress

    def setting(self, name: str, line: str) -> None:
        self.result["settings"].append(key_of(name))
        self._changed(line)

    def refused(self, refusal: SettingRefusal) -> None:
        self.result["refused"].append({"key": refusal.key, "text": refusal.text})
        logger.warning(_LOG_LINE, refusal.text)

    def done(self, action: Action, model: str) -> None:
        self.result[action.value].append(model)
        self._changed(f"model {model} is {action.value}")

    def failed(self, model: str, text: str) -> None:
        self.result["failed"].append({"model": model, "text": text})
        logger.error(_LOG_LINE, f"model {model}: {text}")

    @property
    def is_empty(self) -> bool:
        return not any(self.result.values())

    def outcome(self) -> VerbOutcome:
        """Return success if the server is as the file says, else a text of all differences."""
        texts = [one["text"] for one in self.result["refused"]]
        texts += [f"model {one['model']}: {one['text']}" for one in self.result["failed"]]
        if texts:
            return VerbOutcome(Code.INVALID_ARGUMENT.value, "\n".join(texts), self.result)
        return VerbOutcome("", NOTHING if self.is_empty else "", self.result)

    def _changed(self, line: str) -> None:
        logger.info(_LOG_LINE, line)
        self._progress(line)


class ConfigWork:
    """The operations of a reload on one model: load, scale or unload. ``devices`` places its instances."""

    def __init__(self, models: ServedModels, attached: AttachedModels, devices: ServerDevices) -> None:
        self._models = models
        self._attached = attached
        self._devices = devices

    def is_served(self, model: str) -> bool:
        return self._models.table.is_served(model)

    def scale_count(self, specs: Sequence[ModelSpec]) -> int | None:
        """Return the instances of each device, or None if the number or the devices would differ."""
        if any(one.device == AUTO for spec in specs for one in spec.instances):
            return None
        try:
            return even_count(self._placed(specs))
        except RequestError:  # the load reports the error
            return None

    def start(self, action: Action, model: str, specs: Sequence[ModelSpec], answer: OnDone) -> None:
        if (refusal := self._attached.attached_refusal(model, "loads")) is not None:
            answer(refusal)
        elif action is Action.UNLOAD:
            self._models.submit(UnloadOperation(model, answer))
        elif action is Action.SCALE and (count := self.scale_count(specs)) is not None:
            self._models.submit(ResizeOperation(model, answer, count))
        else:
            self._models.submit(
                LoadOperation(model, answer, lambda: self._placed(specs), failed_version, replaces=True)
            )

    def cancel(self, model: str) -> None:
        self._models.cancel(model)

    def names_changed(self, models: Sequence[str]) -> None:
        """Send the repository index of models that the config has added or dropped to the front."""
        self._models.table.send_states(*models)

    def undeclared(self, model: str, reason: str) -> None:
        """Note in the repository index why a model that is not served cannot be."""
        if not self.is_served(model):
            self._models.table.index.undeclared(model, reason)
            self._models.table.send_states(model)

    def _placed(self, specs: Sequence[ModelSpec]) -> Sequence[ModelSpec]:
        """Place the versions on devices. Raise ``InvalidArgument`` if a device is missing."""
        try:
            return self._devices.place(specs, again=True, beside=self._models.table.specs())
        except DeviceError as error:
            raise InvalidArgument(str(error)) from None


class AppliedModels:
    """The models of the config as they were last applied."""

    def __init__(self, models: ConfigModels) -> None:
        self._declared = dict(models.declared)
        self._wanted = set(models.wanted)

    def snapshot(self) -> ConfigModels:
        return ConfigModels(dict(self._declared), frozenset(self._wanted))

    def set_declared(self, model: str, specs: Sequence[ModelSpec]) -> None:
        self._declared[model] = tuple(specs)

    def set_applied(self, model: str, now: ConfigModels) -> None:
        """Note that a model is as this config says, including that it is gone."""
        self._wanted.discard(model)
        self._wanted.update({model} & set(now.wanted))
        if model in now.declared:
            self._declared[model] = tuple(now.declared[model])
        else:
            self._declared.pop(model, None)


@dataclass(eq=False)
class ConfigRun:
    """One reload of the models, started once. ``touched`` are the models whose files have changed.
    ``change_refusal`` returns an error if the server ends and no model can be loaded any more. ``on_end`` is
    called at the end.
    """

    _work: ConfigWork
    _applied: AppliedModels
    _now: ConfigModels
    _report: ConfigReport
    _change_refusal: Callable[[], GpuserveError | None]
    _on_end: Callable[[], None]
    _touched: Collection[str] = ()

    def __post_init__(self) -> None:
        self._actions: dict[str, Action] = {}
        #: The models that must be done before each, and their order; those that run, and those that failed.
        self._needs: dict[str, set[str]] = {}
        self._steps = TopologicalSorter[str]()
        self._running: set[str] = set()
        self._failed: set[str] = set()
        self._then = self._on_end

    def start(self) -> None:
        before = self._applied.snapshot()
        found = actions(before, self._now, self._work.is_served, self._touched)
        self._actions = found.copy()
        for name, action in found.items():
            if action is Action.SCALE and self._work.scale_count(self._now.declared[name]) is None:
                self._actions[name] = Action.RELOAD  # its instances cannot be resized in place
        for name in {*before.declared, *self._now.declared} - found.keys():
            self._applied.set_applied(name, self._now)
        self._work.names_changed(sorted(before.declared.keys() ^ self._now.declared.keys()))
        if not found and self._report.is_empty:
            logger.info(_LOG_LINE, NOTHING)
        loads = [name for name, action in self._actions.items() if action is not Action.UNLOAD]
        self._run_steps(loads, self._unload)

    def cancel(self, models: Collection[str]) -> None:
        """Cancel running operations on these models, because their files have changed again."""
        for name in self._running.intersection(models):
            self._work.cancel(name)

    def cancel_outdated(self, now: ConfigModels) -> None:
        """Cancel running operations on models whose declarations have changed again: they may never end."""
        for name in list(self._running):
            if now.declared.get(name) != self._now.declared.get(name):
                self._work.cancel(name)

    def _unload(self) -> None:
        """Unload the models that the config has dropped. They are served until the others are loaded."""
        unloads = [name for name, action in self._actions.items() if action is Action.UNLOAD]
        declared = self._applied.snapshot().declared
        for name in list(unloads):
            users = [
                one
                for one in declared
                if one not in unloads
                and name in ensemble_members(one, declared.get)
                and self._work.is_served(one)
            ]
            if users:
                unloads.remove(name)
                self._report.failed(name, f"not unloaded, because model {users[0]} needs it")
        self._run_steps(unloads, self._on_end)

    # ---- steps in their order -------------------------------------------------------------

    def _run_steps(self, names: Sequence[str], then: Callable[[], None]) -> None:
        chosen = {name: self._actions[name] for name in names}
        before = self._applied.snapshot()
        self._needs = needs(chosen, before.declared, self._now.declared)
        self._steps = TopologicalSorter(self._needs)
        self._steps.prepare()
        self._then = then
        self._continue()

    def _continue(self) -> None:
        """Start all steps that can start. A step that ends at once calls this method again."""
        steps = self._steps
        while ready := steps.get_ready():
            self._running.update(ready)
            for name in ready:
                self._start_step(name)
        if steps is self._steps and not steps.is_active():
            self._steps = TopologicalSorter()  # so that the end is reported once
            self._then()

    def _start_step(self, name: str) -> None:
        refusal = self._change_refusal()
        if refusal is None and (failed := self._failed.intersection(self._needs[name])):
            text = f"it stays as it was, because model {min(failed)}, which it needs, failed"
            refusal = InvalidArgument(text)
        if refusal is not None:
            self._on_done(name, refusal)
            return
        specs, action = self._now.declared.get(name, ()), self._actions[name]
        try:
            self._work.start(action, name, specs, lambda error: self._on_done(name, error))
        except Exception as error:
            self._on_done(name, refuse_change(f"the change of model '{name}'", error))

    def _on_done(self, name: str, error: GpuserveError | None) -> None:
        if error is None:
            self._applied.set_applied(name, self._now)
            self._report.done(self._actions[name], name)
        else:
            self._failed.add(name)
            self._report.failed(name, str(error).strip())
        self._running.remove(name)
        self._steps.done(name)
        self._continue()
