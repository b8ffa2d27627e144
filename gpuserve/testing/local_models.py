"""``LocalModels``: all models of a configuration in this process, which may ask each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from gpuserve.core.errors import StartupError
from gpuserve.model.rules import by_name
from gpuserve.model.spec import ModelSpec
from gpuserve.testing.answers import Outputs
from gpuserve.testing.local_ensemble import LocalEnsemble, LocalOne
from gpuserve.testing.local_model import LocalModel, outputs_of
from gpuserve.testing.others import Other, OtherModels
from gpuserve.testing.requests import LocalRequest, WrongCall
from gpuserve_worker.calling.callable import LoadError
from gpuserve_worker.calling.failure import failure_of
from gpuserve_worker.calling.questions import ModelCallError

Found = TypeVar("Found")


class LocalModels:
    """Models that are loaded and asked here, each by one instance. ``others`` answer in the place of models
    that are not among them.
    """

    def __init__(self, specs: Sequence[ModelSpec], others: Mapping[str, Other]) -> None:
        self._others = dict(others)
        self._models = {(one.name, one.version): self._made(one) for one in specs}
        self._newest = {name: versions[-1].version for name, versions in by_name(specs).items()}
        self._loaded: list[LocalOne] = []
        self._introduce()

    def open(self) -> None:
        """Load every model. Raises StartupError: one cannot be loaded; none is left loaded then."""
        try:
            for one in self._models.values():
                _load(one)
                self._loaded.append(one)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the models, those that were loaded last first."""
        while self._loaded:
            self._loaded.pop().close()

    def find(self, model: str, version: str = "") -> LocalOne:
        """A model by its name and version, "" being the newest. Raises ModelCallError: there is none."""
        number = int(version) if version.isdigit() else self._newest.get(model, 0)
        found = self._models.get((model, number))
        if found is None:
            of = f" version {version}" if version and model in self._newest else ""
            raise ModelCallError("NOT_FOUND", f"Request for unknown model: '{model}'{of} is not found")
        return found

    def infer(self, model: str, version: str, requests: Sequence[LocalRequest]) -> list[Outputs]:
        """The outputs for requests that make one batch. Raises ModelCallError: what a client would be told;
        its cause is what the callable raised. WrongCall: no client could ask for this.
        """
        found = self.find(model, version)
        return _as_told(lambda: outputs_of(found.answers(requests)))

    def stream(self, model: str, version: str, request: LocalRequest) -> Iterator[Outputs]:
        """The responses to a request, each when it is asked for; raises as ``infer``."""
        responses = self.find(model, version).responses(request)
        while (one := _as_told(lambda: next(responses, None))) is not None:
            yield one

    def _made(self, spec: ModelSpec) -> LocalOne:
        if spec.is_ensemble:
            return LocalEnsemble(spec, self.find)
        source = spec.instances[0].source
        if source.get("python"):
            raise WrongCall(
                f"model {spec.name!r} runs in a Python of its own, {source['python']}: expected workers=True"
            )
        return LocalModel(spec, source, OtherModels({}))

    def _introduce(self) -> None:
        """Let every model ask the newest versions of all, and the others."""
        newest = {name: self._models[name, version] for name, version in self._newest.items()}
        for one in self._models.values():
            if isinstance(one, LocalModel):
                one.others.add(self._others | newest)


def _load(model: LocalOne) -> None:
    try:
        model.load()
    except LoadError as error:
        failed = StartupError(f"model {model.spec.name!r} could not be loaded: {error}")
        if error.traceback:
            failed.add_note(error.traceback)
        raise failed from error


def _as_told(ask: Callable[[], Found]) -> Found:
    try:
        return ask()
    except (ModelCallError, WrongCall):
        raise
    except Exception as error:  # user code may raise anything
        raise ModelCallError(*failure_of(error)) from error
