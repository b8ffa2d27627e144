"""What an operator asks of a running server, by the control socket or by the admin API."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from gpuserve.control import operator as operator_arguments
from gpuserve.control.operator import AnswerOutcome, Tell, VerbOutcome, failed
from gpuserve.errors import AlreadyExists, GpuserveError, InvalidArgument, RequestError, Unavailable
from gpuserve.model.spec import ModelSpec
from gpuserve.placement.instance_counts import instances_by_device
from gpuserve.supervisor.attach.attached_models import AttachedModels
from gpuserve.supervisor.core.refusals import refuse_change
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.models.load_requests import LoadRequests
from gpuserve.supervisor.models.model_operations import ResizeOperation, failed_version
from gpuserve.supervisor.models.served_models import ServedModels
from gpuserve.supervisor.operator.quiescence import Quiescence
from gpuserve.supervisor.operator.stacks import OperatorStacks
from gpuserve.supervisor.operator.status import FrontCensus, OperatorStatus
from gpuserve.supervisor.publication.publication import Publication
from gpuserve.supervisor.reload.config_reload import ConfigReload

#: What changes nothing can be asked in every state of the server.
_ALWAYS: Final = frozenset({"status", "events", "logs"})


class OperatorVerbs:
    """The verbs of one server. Called in the reactor's thread. An operator is trusted: what clients may load
    and unload does not bind him.
    """

    def __init__(
        self,
        core: ServerCore,
        models: ServedModels,
        attached: AttachedModels,
        loads: LoadRequests,
        config: ConfigReload,
        publication: Publication,
    ) -> None:
        self.quiescence = Quiescence(core)
        self.census = FrontCensus(core)
        self.status = OperatorStatus(core, self.census, models.table, attached, self.quiescence, config.path)
        self._core = core
        self._publication = publication
        self._stacks = OperatorStacks(core.front, models.table)
        self._life = core.life
        self._models = models
        self._attached = attached
        self._loads = loads
        self._config = config

    def ask(self, verb: str, arguments: dict[str, Any], tell: Tell, answer: AnswerOutcome) -> None:
        """Do what a verb says; ``tell`` hears how it goes on, ``answer`` once how it ended."""
        try:
            operator_arguments.check_verb(verb, arguments)
            if verb in _ALWAYS:
                self._look(verb, arguments, answer)
                return
            if verb == "stacks":
                self._stacks.ask(tell, answer)
                return
            if (refusal := self._life.why_not_operated()) is not None:
                raise refusal
            # An answer waits until the front has heard all that it was told, so that it holds for clients.
            self._begin(verb, arguments, tell, lambda outcome: self.census.ask(lambda _: answer(outcome)))
        except Exception as error:
            answer(failed(refuse_change(f"the command {verb}", error)))

    def _look(self, verb: str, arguments: dict[str, Any], answer: AnswerOutcome) -> None:
        """Answer what can be asked in every state of the server."""
        match verb:
            case "status":
                self.status.ask(answer)
            case "events":
                self._publication.open(lambda: answer(self._events()))
            case "logs":
                answer(self._logs(operator_arguments.any_model(verb, arguments)))

    def _events(self) -> VerbOutcome:
        """Say where to subscribe, and what has happened until now."""
        if not self._publication.address:
            return failed(Unavailable("the server cannot publish what happens; its log says why"))
        events = [one.document() for one in self._core.events.recent]
        return VerbOutcome("", "", {"address": self._publication.address, "events": events})

    def _logs(self, model: str) -> VerbOutcome:
        """Give the last lines of the log, or those of a model that there is or was."""
        lines, known = self._core.lines.of(model), self._models.table.names()
        if model and not lines and model not in known and not self._attached.has(model):
            raise operator_arguments.unknown_model(model, known)
        return VerbOutcome("", "", {"lines": [one.document() for one in lines]})

    def _begin(self, verb: str, arguments: dict[str, Any], tell: Tell, answer: AnswerOutcome) -> None:
        match verb:
            case "drain":
                self._drain(arguments, tell, answer)
            case "load":
                self._load(operator_arguments.model_name(verb, arguments), tell, answer)
            case "unload":
                self._unload(operator_arguments.model_name(verb, arguments), tell, answer)
            case "reload" if arguments.get("model") is not None:
                self._reload(operator_arguments.model_name(verb, arguments), tell, answer)
            case "reload":
                self._config.begin(answer, tell)
            case "scale":
                self._scale(operator_arguments.counts(arguments), tell, answer)

    def _drain(self, arguments: dict[str, Any], tell: Tell, answer: AnswerOutcome) -> None:
        timeout_s = operator_arguments.timeout_s(arguments)
        if not operator_arguments.undo(arguments):
            self.quiescence.drain(timeout_s, tell, answer)
        elif timeout_s is None:
            self.quiescence.resume(answer)
        else:
            raise InvalidArgument("timeout_s: cannot be combined with undo")

    def _load(self, model: str, tell: Tell, answer: AnswerOutcome) -> None:
        self._check_own(model, "loads")
        if not self._models.table.is_served(model):
            tell(f"loading model {model}")
        told = functools.partial(_loaded, model, answer)
        failure = functools.partial(_failure, "is not loaded")
        self._loads.load(model, {}, told, again=False, failure=failure, unreadable=self._unreadable)

    def _unload(self, model: str, tell: Tell, answer: AnswerOutcome) -> None:
        self._check_own(model, "unloads")
        self._check_loaded(model)
        tell(f"unloading model {model}")
        specs = self._models.table.specs()
        without = sorted({one.name for one in specs if any(step.model == model for step in one.steps)})
        rest = f"; without it these cannot run: {', '.join(without)}" if without else ""
        self._loads.unload(model, functools.partial(_answered, f"model '{model}' is unloaded{rest}", answer))

    def _reload(self, model: str, tell: Tell, answer: AnswerOutcome) -> None:
        self._check_own(model, "loads")
        self._check_loaded(model)
        tell(f"loading model {model} anew, beside the one that serves")
        told = functools.partial(_answered, f"model '{model}' is loaded anew", answer)
        failure = functools.partial(_failure, "stays as it was")
        self._loads.load(model, {}, told, failure=failure, unreadable=self._unreadable, is_last_word=True)

    def _scale(self, counts: dict[str, int], tell: Tell, answer: AnswerOutcome) -> None:
        for model, count in counts.items():
            self._check_own(model, "scales")
            self._check_loaded(model)
            self._models.check_resize(model, count)
        _Scaling(self._models, counts, tell, answer).begin()

    # ---- which models there are -----------------------------------------------------------

    def _check_own(self, model: str, does: str) -> None:
        if (refusal := self._attached.why_not_ours(model, does)) is not None:
            raise refusal

    def _unreadable(self, model: str, error: GpuserveError | None) -> RequestError:
        """Say what is wrong with the file as it is now, or that it has no such model."""
        if error is not None:
            return InvalidArgument(str(error))
        return operator_arguments.unknown_model(model, self._models.table.names())

    def _check_loaded(self, model: str) -> None:
        """Refuse a model that is neither loaded nor being loaded."""
        if not self._models.table.of(model):
            known = self._models.table.names()
            if model in known:
                raise InvalidArgument(f"model '{model}' is not loaded")
            raise operator_arguments.unknown_model(model, known)


def _answered(text: str, answer: AnswerOutcome, error: RequestError | None) -> None:
    answer(VerbOutcome("", text, {}) if error is None else failed(error))


def _failure(outcome: str, spec: ModelSpec, instance: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"model '{spec.name}' {outcome}: {failed_version(spec, instance, reason)}")


def _loaded(model: str, answer: AnswerOutcome, error: RequestError | None) -> None:
    if isinstance(error, AlreadyExists):
        answer(VerbOutcome("", str(error), {}))
    else:
        _answered(f"model '{model}' is loaded", answer, error)


class _Scaling:
    """One ``scale`` of several models, whose names and numbers are good: each in its own time, and one answer
    for all. ``counts`` has the instances on each device, by model.
    """

    def __init__(
        self, models: ServedModels, counts: Mapping[str, int], tell: Tell, answer: AnswerOutcome
    ) -> None:
        self._models = models
        self._counts = counts
        self._tell = tell
        self._answer = answer
        self._left = len(counts)
        self._result: dict[str, dict[str, int]] = {}
        self._errors: dict[str, GpuserveError] = {}

    def begin(self) -> None:
        self._result = {model: {"before": self._present(model)} for model in self._counts}
        for model, count in self._counts.items():
            self._tell(f"model {model}: {self._result[model]['before']} to {count} instances on each device")
            answer = functools.partial(self._scaled, model)
            self._models.begin(ResizeOperation(model, answer, count))

    def _present(self, model: str) -> int:
        """Return how many instances a model has on a device; where they differ, on the one that has most."""
        specs = [one.spec for one in self._models.table.served(model)]
        return max((n for one in specs for n in instances_by_device(one).values()), default=0)

    def _scaled(self, model: str, error: GpuserveError | None) -> None:
        self._result[model]["after"] = self._present(model)
        if error is not None:
            self._errors[model] = error
        self._left -= 1
        if not self._left:
            self._answer(self._outcome())

    def _outcome(self) -> VerbOutcome:
        result: dict[str, Any] = {"models": self._result}
        if not self._errors:
            return VerbOutcome("", "", result)
        first = next(iter(self._errors.values()))
        text = "; ".join(str(error) for error in self._errors.values())
        kind = type(first) if isinstance(first, RequestError) else Unavailable
        return failed(kind(text), result)
