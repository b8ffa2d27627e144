"""One reload of the models of a config: what has changed is done in its order, what was done is noted as
applied, and all of it is reported. A model that fails is left as it was, and is tried again by the next
reload.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from gpuserve.config.settings.checks import SettingRefusal, key_of
from gpuserve.control.operator import Tell, VerbOutcome
from gpuserve.errors import Code, DeviceError, GpuserveError, InvalidArgument, RequestError
from gpuserve.model.spec import ModelSpec
from gpuserve.placement.server_devices import ServerDevices
from gpuserve.supervisor.attach.attached_models import AttachedModels
from gpuserve.supervisor.core.refusals import refuse_change
from gpuserve.supervisor.models.model_operations import (
    Answer,
    LoadOperation,
    ResizeOperation,
    UnloadOperation,
    failed_version,
)
from gpuserve.supervisor.models.repository import members
from gpuserve.supervisor.models.served_models import ServedModels
from gpuserve.supervisor.reload.changes import (
    Action,
    ConfigModels,
    ReloadSteps,
    actions,
    even_count,
    needs,
)

logger = logging.getLogger(__name__)

_KEYS: Final = (*(one.value for one in Action), "settings", "refused", "failed")
_LINE: Final = "config reload: %s"
NOTHING: Final = "nothing has changed"


class ConfigReport:
    """What one reload has done and what not, with a line of the log for each. ``tell`` is given each change
    as soon as it is made; what was not done is in the outcome.
    """

    def __init__(self, tell: Tell = lambda _: None) -> None:
        self.result: dict[str, list[Any]] = {key: [] for key in _KEYS}
        self._tell = tell

    def setting(self, name: str, line: str) -> None:
        self.result["settings"].append(key_of(name))
        self._changed(line)

    def refused(self, refusal: SettingRefusal) -> None:
        self.result["refused"].append({"key": refusal.key, "text": refusal.text})
        logger.warning(_LINE, refusal.text)

    def done(self, action: Action, model: str) -> None:
        self.result[action.value].append(model)
        self._changed(f"model {model} is {'loaded anew' if action is Action.RELOAD else action.value}")

    def failed(self, model: str, text: str) -> None:
        self.result["failed"].append({"model": model, "text": text})
        logger.error(_LINE, f"model {model}: {text}")

    @property
    def is_empty(self) -> bool:
        return not any(self.result.values())

    def outcome(self) -> VerbOutcome:
        """Make a success where the server is as the file says, else a list of all that is not so."""
        texts = [one["text"] for one in self.result["refused"]]
        texts += [f"model {one['model']}: {one['text']}" for one in self.result["failed"]]
        if texts:
            return VerbOutcome(Code.INVALID_ARGUMENT.value, "\n".join(texts), self.result)
        return VerbOutcome("", NOTHING if self.is_empty else "", self.result)

    def _changed(self, line: str) -> None:
        logger.info(_LINE, line)
        self._tell(line)


class ConfigWork:
    """What a reload does to a model of the server: load, scale or unload it. ``devices`` places it."""

    def __init__(self, models: ServedModels, attached: AttachedModels, devices: ServerDevices) -> None:
        self._models = models
        self._attached = attached
        self._devices = devices

    def is_served(self, model: str) -> bool:
        return self._models.table.is_served(model)

    def scale_count(self, specs: Sequence[ModelSpec]) -> int | None:
        """Return how many instances on each device models get, of which only the numbers of instances have
        changed; None where they cannot have these in place, which takes one number for all devices.
        """
        try:
            return even_count(self._placed(specs))
        except RequestError:  # said when it is loaded
            return None

    def begin(self, action: Action, model: str, specs: Sequence[ModelSpec], answer: Answer) -> None:
        if (refusal := self._attached.why_not_ours(model, "loads")) is not None:
            answer(refusal)
        elif action is Action.UNLOAD:
            self._models.begin(UnloadOperation(model, answer))
        elif action is Action.SCALE and (count := self.scale_count(specs)) is not None:
            self._models.begin(ResizeOperation(model, answer, count))
        else:
            self._models.begin(
                LoadOperation(model, answer, lambda: self._placed(specs), failed_version, replaces=True)
            )

    def take_back(self, model: str) -> None:
        self._models.take_back(model)

    def names_changed(self, models: Sequence[str]) -> None:
        """Tell clients what may be loaded now, because the config has other models than before."""
        self._models.table.tell_states(*models)

    def undeclared(self, model: str, reason: str) -> None:
        """Note why a model that is not served cannot be."""
        if not self.is_served(model):
            self._models.table.index.undeclared(model, reason)
            self._models.table.tell_states(model)

    def _placed(self, specs: Sequence[ModelSpec]) -> Sequence[ModelSpec]:
        """Put the versions on devices, by another look; ``InvalidArgument`` where one cannot be had."""
        try:
            return self._devices.place(specs, again=True)
        except DeviceError as error:
            raise InvalidArgument(str(error)) from None


class AppliedModels:
    """The models of the config as they were applied last."""

    def __init__(self, models: ConfigModels) -> None:
        self._declared = dict(models.declared)
        self._wanted = set(models.wanted)

    def snapshot(self) -> ConfigModels:
        return ConfigModels(dict(self._declared), frozenset(self._wanted))

    def loaded(self, model: str, specs: Sequence[ModelSpec]) -> None:
        self._declared[model] = tuple(specs)

    def settled(self, model: str, now: ConfigModels) -> None:
        """Note that a model is as this config says, which may be that it is gone."""
        self._wanted.discard(model)
        self._wanted.update({model} & set(now.wanted))
        if model in now.declared:
            self._declared[model] = tuple(now.declared[model])
        else:
            self._declared.pop(model, None)


class ConfigRun:
    """One reload of the models, to be begun once; ``touched`` are those whose files have changed, whatever is
    declared of them. ``why_not_now`` says why no model can be loaded any more,
    because the server ends; ``on_end`` is called when nothing is left to be done.
    """

    def __init__(
        self,
        work: ConfigWork,
        applied: AppliedModels,
        now: ConfigModels,
        report: ConfigReport,
        why_not_now: Callable[[], GpuserveError | None],
        on_end: Callable[[], None],
        touched: Collection[str] = (),
    ) -> None:
        self._work = work
        self._applied = applied
        self._now = now
        self._report = report
        self._touched = touched
        self._why_not_now = why_not_now
        self._on_end = on_end
        self._actions: dict[str, Action] = {}
        self._steps = ReloadSteps({})
        self._then: Callable[[], None] = on_end

    def begin(self) -> None:
        before = self._applied.snapshot()
        found = actions(before, self._now, self._work.is_served, self._touched)
        self._actions = {name: self._feasible(name, action) for name, action in found.items()}
        for name in {*before.declared, *self._now.declared} - found.keys():
            self._applied.settled(name, self._now)
        self._work.names_changed(sorted(before.declared.keys() ^ self._now.declared.keys()))
        if not found and self._report.is_empty:
            logger.info(_LINE, NOTHING)
        loads = [name for name, action in self._actions.items() if action is not Action.UNLOAD]
        self._do(loads, self._unload)

    def take_back(self, models: Collection[str]) -> None:
        """Take back what is at work on these models: their files are others by now."""
        for name in set(models).intersection(self._steps.running):
            self._work.take_back(name)

    def take_back_outdated(self, now: ConfigModels) -> None:
        """Take back what is at work on models that the file declares otherwise by now: it may never end."""
        for name in list(self._steps.running):
            if now.declared.get(name) != self._now.declared.get(name):
                self._work.take_back(name)

    def _feasible(self, model: str, action: Action) -> Action:
        """Turn a scale into a reload where the numbers of instances cannot be had in place."""
        if action is Action.SCALE and self._work.scale_count(self._now.declared[model]) is None:
            return Action.RELOAD
        return action

    def _unload(self) -> None:
        """Unload last what is not in the config any more: until then it is served."""
        unloads = [name for name, action in self._actions.items() if action is Action.UNLOAD]
        declared = self._applied.snapshot().declared
        for name in list(unloads):
            users = [
                one
                for one in declared
                if one not in unloads and name in members(one, declared.get) and self._work.is_served(one)
            ]
            if users:
                unloads.remove(name)
                self._report.failed(name, f"not unloaded, because model {users[0]} needs it")
        self._do(unloads, self._on_end)

    # ---- in their order -------------------------------------------------------------------

    def _do(self, names: Sequence[str], then: Callable[[], None]) -> None:
        chosen = {name: self._actions[name] for name in names}
        before = self._applied.snapshot()
        self._steps = ReloadSteps(needs(chosen, before.declared, self._now.declared))
        self._then = then
        self._go_on()

    def _go_on(self) -> None:
        """Begin what can begin. Some of it may be done at once, and call this again."""
        steps = self._steps
        while begun := steps.begin():
            for name in begun:
                self._begin(name)
        if steps.is_over and steps is self._steps:
            self._steps = ReloadSteps({})  # the end comes once
            self._then()

    def _begin(self, name: str) -> None:
        refusal = self._why_not_now()
        if refusal is not None:
            self._answered(name, refusal)
            return
        specs, action = self._now.declared.get(name, ()), self._actions[name]
        try:
            self._work.begin(action, name, specs, lambda error: self._answered(name, error))
        except Exception as error:
            self._answered(name, refuse_change(f"the change of model '{name}'", error))

    def _answered(self, name: str, error: GpuserveError | None) -> None:
        if error is None:
            self._applied.settled(name, self._now)
            self._report.done(self._actions[name], name)
            self._steps.done(name)
        else:
            self._report.failed(name, str(error).strip())
            for lost, needed in self._steps.failed(name):
                self._report.failed(
                    lost, f"it stays as it was, because model {needed}, which it needs, failed"
                )
        self._go_on()
