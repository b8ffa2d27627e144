"""What clients or operators ask for by a model's name: from the name to an operation on the served models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpuserve.declare.spec import ModelSpec
from gpuserve.declare.spec_changes import changed
from gpuserve.errors import (
    AlreadyExists,
    DeviceError,
    GpuserveError,
    RequestError,
    Unavailable,
)
from gpuserve.placement.server_devices import ServerDevices
from gpuserve.supervisor.attach.attached_models import AttachedModels
from gpuserve.supervisor.core.front_keeper import Answer as ClientAnswer
from gpuserve.supervisor.core.server_life import ServerLife
from gpuserve.supervisor.models.model_operations import (
    Answer,
    Failure,
    LoadOperation,
    UnloadOperation,
    refused_load,
)
from gpuserve.supervisor.models.repository import members
from gpuserve.supervisor.models.served_models import ServedModels


class LoadRequests:
    """Loads and unloads by name; the models of attached programs are theirs alone. ``on_loaded`` is told each
    model that was loaded, and how it was declared.
    """

    def __init__(
        self,
        life: ServerLife,
        models: ServedModels,
        attached: AttachedModels,
        devices: ServerDevices,
        on_loaded: Callable[[str, Sequence[ModelSpec]], None],
    ) -> None:
        self._life = life
        self._models = models
        self._attached = attached
        self._devices = devices
        self._on_loaded = on_loaded

    def load(
        self,
        model: str,
        changes: dict[str, Any],
        answer: ClientAnswer,
        *,
        again: bool = True,
        failure: Failure = refused_load,
        is_last_word: bool = False,
    ) -> None:
        """Load every version of a model as it is declared now, with these changes. Of an ensemble, those
        models of its steps that are not loaded go first. Without ``again`` one that is loaded when it is its
        turn is answered with ``AlreadyExists``.
        """
        refusal = self._life.why_not_now() or self._attached.why_not_ours(model, "loads")
        if refusal is not None:
            answer(refusal)
            return
        tell = _to_client(answer)

        def load(error: GpuserveError | None = None) -> None:
            if error is None:
                self._load(model, changes, tell, failure, again=again, is_last_word=is_last_word)
            else:
                tell(error)

        missing = self._missing_members(model)
        first = _AllLoaded(len(missing), load)
        for one in missing:
            self._load(one, {}, first.answered, failure)
        if not missing:
            load()

    def _load(
        self,
        model: str,
        changes: dict[str, Any],
        tell: Answer,
        failure: Failure,
        *,
        again: bool = True,
        is_last_word: bool = False,
    ) -> None:
        declared: list[ModelSpec] = []

        def read() -> Sequence[ModelSpec]:
            if not again and self._models.table.is_served(model):
                raise AlreadyExists(f"model '{model}' is loaded already")
            declared[:] = self._models.table.repository.read(model)
            specs = changed(declared, changes)
            try:
                return self._devices.place(specs, again=True)
            except DeviceError as error:
                raise failure(specs[0], "", str(error)) from None

        def answer(error: GpuserveError | None) -> None:
            if error is None:
                self._on_loaded(model, declared)
            tell(error)

        load = LoadOperation(model, answer, read, failure, replaces=True, is_last_word=is_last_word)
        self._models.begin(load)

    def _missing_members(self, model: str) -> list[str]:
        table = self._models.table

        def read(name: str) -> Sequence[ModelSpec]:
            try:
                return table.repository.read(name)
            except GpuserveError:  # said when it is loaded
                return ()

        return [one for one in members(model, read) if one != model and not table.is_served(one)]

    def unload(self, model: str, answer: ClientAnswer) -> None:
        """Unload every version of a model; one that is not loaded is no error."""
        refusal = self._life.why_not_now() or self._attached.why_not_ours(model, "unloads")
        if refusal is not None:
            answer(refusal)
        else:
            self._models.begin(UnloadOperation(model, _to_client(answer)))


class _AllLoaded:
    """Several loads, of which only the last, or the first that fails, is told on."""

    def __init__(self, count: int, tell: Answer) -> None:
        self._left = count
        self._tell: Answer | None = tell

    def answered(self, error: GpuserveError | None) -> None:
        self._left -= 1
        if self._tell is not None and (error is not None or not self._left):
            tell, self._tell = self._tell, None
            tell(error)


def _to_client(answer: ClientAnswer) -> Answer:
    def answer_client(error: GpuserveError | None) -> None:
        # All that is no answer to a request is about the end of the server.
        answer(error if error is None or isinstance(error, RequestError) else Unavailable("Server exiting"))

    return answer_client
