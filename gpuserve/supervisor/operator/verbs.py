"""What an operator asks of a running server, whoever brings it: the control socket, the admin API, a signal.

Each verb's arguments are checked here before anything is done. How a verb is done is the business of others.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from gpuserve.errors import AlreadyExists, Code, GpuserveError, InvalidArgument, RequestError
from gpuserve.spec import ModelSpec
from gpuserve.supervisor.attached_models import AttachedModels
from gpuserve.supervisor.load_requests import LoadRequests, only_its_program
from gpuserve.supervisor.model_operations import failed_version
from gpuserve.supervisor.operator import arguments as operator_arguments
from gpuserve.supervisor.operator.front_census import FrontCensus
from gpuserve.supervisor.operator.outcome import AnswerOutcome, Outcome, Tell, failed
from gpuserve.supervisor.operator.quiescence import Quiescence
from gpuserve.supervisor.operator.scaling import Scaling
from gpuserve.supervisor.operator.status import OperatorStatus
from gpuserve.supervisor.reload.config_reload import ConfigReload
from gpuserve.supervisor.repository import Repository
from gpuserve.supervisor.served_models import ServedModels
from gpuserve.supervisor.server_state import ServerLife

__all__ = ["OperatorVerbs", "Outcome"]


class OperatorVerbs:
    """The verbs of one server. Called in the reactor's thread.

    An operator is trusted: what clients may load and unload does not bind him.
    """

    def __init__(
        self,
        life: ServerLife,
        models: ServedModels,
        attached: AttachedModels,
        loads: LoadRequests,
        repository: Repository,
        status: OperatorStatus,
        census: FrontCensus,
        quiescence: Quiescence,
        config_reload: ConfigReload,
    ) -> None:
        self._life = life
        self._models = models
        self._attached = attached
        self._loads = loads
        self._repository = repository
        self._status = status
        self._census = census
        self._quiescence = quiescence
        self._config_reload = config_reload

    def ask(self, verb: str, arguments: dict[str, Any], tell: Tell, answer: AnswerOutcome) -> None:
        """Do what a verb says; ``tell`` hears how it goes on, ``answer`` once how it ended."""
        try:
            operator_arguments.check_verb(verb, arguments)
            if verb == "status":
                self._status.ask(answer)
                return
            if (refusal := self._life.why_not_operated()) is not None:
                raise refusal
            self._begin(verb, arguments, tell, self._once_it_holds(answer))
        except RequestError as error:
            answer(failed(error))

    def _once_it_holds(self, answer: AnswerOutcome) -> AnswerOutcome:
        """Answers when the front has heard all that it was told before: it is so for clients, too."""
        return lambda outcome: self._census.ask(lambda _: answer(outcome))

    def _begin(self, verb: str, arguments: dict[str, Any], tell: Tell, answer: AnswerOutcome) -> None:
        """Begin a verb.

        Raises:
            RequestError: it cannot be; nothing has been done.
        """
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
                self._config_reload.begin(answer, tell)
            case "scale":
                self._scale(operator_arguments.counts(arguments), tell, answer)

    def _drain(self, arguments: dict[str, Any], tell: Tell, answer: AnswerOutcome) -> None:
        timeout_s = operator_arguments.timeout_s(arguments)
        if not operator_arguments.undo(arguments):
            self._quiescence.drain(timeout_s, tell, answer)
        elif timeout_s is None:
            self._quiescence.resume(answer)
        else:
            raise InvalidArgument("timeout_s: what is undone takes no time")

    def _load(self, model: str, tell: Tell, answer: AnswerOutcome) -> None:
        self._check_own(model, "loads")
        self._check_declared(model)
        if not self._models.is_served(model):
            tell(f"loading model {model}")
        told = functools.partial(_loaded, model, answer)
        self._loads.load(model, {}, told, again=False, failure=_not_loaded)

    def _unload(self, model: str, tell: Tell, answer: AnswerOutcome) -> None:
        self._check_own(model, "unloads")
        self._check_loaded(model)
        tell(f"unloading model {model}")
        without = sorted({one.name for one in self._models.specs() if _has_step(one, model)})
        rest = f"; without it these cannot run: {', '.join(without)}" if without else ""
        self._loads.unload(model, functools.partial(_answered, f"model '{model}' is unloaded{rest}", answer))

    def _reload(self, model: str, tell: Tell, answer: AnswerOutcome) -> None:
        self._check_own(model, "loads")
        self._check_loaded(model)
        self._check_declared(model)
        tell(f"loading model {model} anew, beside the one that serves")
        told = functools.partial(_answered, f"model '{model}' is loaded anew", answer)
        self._loads.load(model, {}, told, failure=_not_reloaded)

    def _scale(self, counts: dict[str, int], tell: Tell, answer: AnswerOutcome) -> None:
        for model, count in counts.items():
            self._check_own(model, "scales")
            self._check_loaded(model)
            self._models.check_resize(model, count)
        Scaling(self._models, counts, tell, answer).begin()

    # ---- which models there are -----------------------------------------------------------

    def _check_own(self, model: str, does: str) -> None:
        if self._attached.has(model):
            raise only_its_program(model, does)

    def _check_declared(self, model: str) -> None:
        """Whether a model is declared now, in the file as it is."""
        try:
            found = self._repository.read(model)
        except GpuserveError as error:
            raise InvalidArgument(str(error)) from None
        if not found:
            raise operator_arguments.unknown_model(model, self._known())

    def _check_loaded(self, model: str) -> None:
        """Whether a model is loaded, or is being."""
        if any(model == one.name for one in self._models.specs()):
            return
        if model in self._known():
            raise InvalidArgument(f"model '{model}' is not loaded")
        raise operator_arguments.unknown_model(model, self._known())

    def _known(self) -> Collection[str]:
        return self._models.names()


def _answered(text: str, answer: AnswerOutcome, error: RequestError | None) -> None:
    answer(Outcome("", text, {}) if error is None else failed(error))


def _has_step(ensemble: ModelSpec, model: str) -> bool:
    return any(step.model == model for step in ensemble.steps)


def _not_loaded(spec: ModelSpec, instance: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"model '{spec.name}' is not loaded: {failed_version(spec, instance, reason)}")


def _not_reloaded(spec: ModelSpec, instance: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"model '{spec.name}' stays as it was: {failed_version(spec, instance, reason)}")


def _loaded(model: str, answer: AnswerOutcome, error: RequestError | None) -> None:
    is_there = isinstance(error, AlreadyExists) and error.code is Code.ALREADY_EXISTS
    if is_there:
        answer(Outcome("", str(error), {}))
    else:
        _answered(f"model '{model}' is loaded", answer, error)
