"""One reload of the models of a config: what has changed is done in its order, and what was done is noted as
applied. A model that fails is left as it was, and is tried again by the next reload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuserve.errors import GpuserveError
from gpuserve.spec import ModelSpec
from gpuserve.supervisor.reload.changes import Action, ConfigModels, Steps, actions, members, needs
from gpuserve.supervisor.reload.report import ConfigReport
from gpuserve.supervisor.reload.work import ConfigWork


class AppliedModels:
    """The models of the config as they were applied last."""

    def __init__(self, models: ConfigModels) -> None:
        self._declared = dict(models.declared)
        self._wanted = set(models.wanted)

    def snapshot(self) -> ConfigModels:
        """What is applied at this moment."""
        return ConfigModels(dict(self._declared), frozenset(self._wanted))

    def loaded(self, model: str, specs: Sequence[ModelSpec]) -> None:
        """A model was loaded as it is declared so."""
        self._declared[model] = tuple(specs)

    def settled(self, model: str, now: ConfigModels) -> None:
        """A model is as this config says, and may be gone by it."""
        self._wanted.discard(model)
        self._wanted.update({model} & set(now.wanted))
        if model in now.declared:
            self._declared[model] = tuple(now.declared[model])
        else:
            self._declared.pop(model, None)


class ConfigRun:
    """One reload, to be begun once. ``why_not_now`` says why no model can be loaded any more, because the
    server ends; ``on_end`` is called when nothing is left to be done.
    """

    def __init__(
        self,
        work: ConfigWork,
        applied: AppliedModels,
        now: ConfigModels,
        report: ConfigReport,
        why_not_now: Callable[[], GpuserveError | None],
        on_end: Callable[[], None],
    ) -> None:
        self._work = work
        self._applied = applied
        self._now = now
        self._report = report
        self._why_not_now = why_not_now
        self._on_end = on_end
        self._actions: dict[str, Action] = {}
        self._steps = Steps({})
        self._then: Callable[[], None] = on_end

    def begin(self) -> None:
        """Do what has to be done."""
        before = self._applied.snapshot()
        found = actions(before, self._now, self._work.is_served)
        self._actions = {name: self._feasible(name, action) for name, action in found.items()}
        for name in {*before.declared, *self._now.declared} - found.keys():
            self._applied.settled(name, self._now)
        self._work.names_changed(sorted(before.declared.keys() ^ self._now.declared.keys()))
        if not found and self._report.is_empty:
            self._report.unchanged()
        loads = [name for name, action in self._actions.items() if action is not Action.UNLOAD]
        self._do(loads, self._unload)

    def _feasible(self, model: str, action: Action) -> Action:
        """Numbers of instances that cannot be had in place are had by another load."""
        if action is Action.SCALE and not self._work.can_scale(self._now.declared[model]):
            return Action.RELOAD
        return action

    def _unload(self) -> None:
        """What is not in the config any more goes last: until then it is served."""
        unloads = [name for name, action in self._actions.items() if action is Action.UNLOAD]
        declared = self._applied.snapshot().declared
        for name in list(unloads):
            users = [
                one
                for one in declared
                if one not in unloads and name in members(one, declared) and self._work.is_served(one)
            ]
            if users:
                unloads.remove(name)
                self._report.failed(name, f"not unloaded, because model {users[0]} needs it")
        self._do(unloads, self._on_end)

    # ---- in their order -------------------------------------------------------------------

    def _do(self, names: Sequence[str], then: Callable[[], None]) -> None:
        chosen = {name: self._actions[name] for name in names}
        before = self._applied.snapshot()
        self._steps = Steps(needs(chosen, before.declared, self._now.declared))
        self._then = then
        self._go_on()

    def _go_on(self) -> None:
        """Begin what can begin. Some of it may be done at once, and call this again."""
        steps = self._steps
        while begun := steps.begin():
            for name in begun:
                self._begin(name)
        if steps.is_over and steps is self._steps:
            self._steps = Steps({})  # the end comes once
            self._then()

    def _begin(self, name: str) -> None:
        refusal = self._why_not_now()
        if refusal is not None:
            self._answered(name, refusal)
            return
        specs = self._now.declared.get(name, ())
        self._work.begin(self._actions[name], name, specs, lambda error: self._answered(name, error))

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
