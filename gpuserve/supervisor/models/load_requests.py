"""What clients or operators ask for by a model's name: from the name to an operation on the served models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from gpuserve.errors import (
    AlreadyExists,
    DeviceError,
    GpuserveError,
    NotFound,
    RequestError,
    Unavailable,
)
from gpuserve.model.spec import ModelSpec
from gpuserve.model.spec_changes import changed
from gpuserve.placement.server_devices import ServerDevices
from gpuserve.supervisor.attach.attached_models import AttachedModels
from gpuserve.supervisor.core.front_keeper import Answer as ClientAnswer
from gpuserve.supervisor.core.server_life import ServerLife
from gpuserve.supervisor.models.model_operations import (
    Answer,
    Failure,
    LoadOperation,
    UnloadOperation,
    cannot_poll,
    refused_load,
)
from gpuserve.supervisor.models.repository import members
from gpuserve.supervisor.models.served_models import ServedModels

logger = logging.getLogger(__name__)

#: What there is of models: their versions, or what is wrong with them.
_Found: TypeAlias = dict[str, Sequence[ModelSpec] | GpuserveError]
#: Why nothing can be loaded by a name; None: nothing of that name is declared.
Unreadable: TypeAlias = Callable[[str, GpuserveError | None], RequestError]


def cannot_be_read(model: str, error: GpuserveError | None) -> RequestError:
    """Tell a client, which may not know what is in the files of a server, and the log."""
    if isinstance(error, RequestError):
        return error
    if error is None:
        return NotFound(str(cannot_poll(model)))
    logger.error("model %s cannot be loaded: %s", model, error)
    return cannot_poll(model)


class LoadRequests:
    """Loads and unloads by name; the models of attached programs are theirs alone. Declarations are read by
    ``run_beside``, which makes a call that may take its time and gives its result to another: models may be
    asked what they are. ``on_loaded`` is told each model that was loaded, and how it was declared.
    """

    def __init__(
        self,
        life: ServerLife,
        models: ServedModels,
        attached: AttachedModels,
        devices: ServerDevices,
        run_beside: Callable[[Callable[[], _Found], Callable[[_Found | GpuserveError], None]], None],
        on_loaded: Callable[[str, Sequence[ModelSpec]], None],
    ) -> None:
        self._life = life
        self._models = models
        self._attached = attached
        self._devices = devices
        self._run_beside = run_beside
        self._on_loaded = on_loaded

    def load(
        self,
        model: str,
        changes: dict[str, Any],
        answer: ClientAnswer,
        *,
        again: bool = True,
        failure: Failure = refused_load,
        unreadable: Unreadable = cannot_be_read,
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
        declared: list[ModelSpec] = []

        def prepare(then: Answer) -> None:
            if not again and self._models.table.is_served(model):
                then(AlreadyExists(f"model '{model}' is loaded already"))
            else:
                self._run_beside(partial(self._look, model), partial(prepared, then))

        def prepared(then: Answer, found: _Found | GpuserveError) -> None:
            own = found if isinstance(found, GpuserveError) else found[model]
            if isinstance(own, GpuserveError) or not own:
                then(unreadable(model, own if isinstance(own, GpuserveError) else None))
                return
            assert isinstance(found, dict)
            declared[:] = own
            self._load_members([one for one in found if one != model], failure, then)

        def read() -> Sequence[ModelSpec]:
            specs = changed(declared, changes)
            try:
                return self._devices.place(specs, again=True)
            except DeviceError as error:
                raise failure(specs[0], "", str(error)) from None

        def answered(error: GpuserveError | None) -> None:
            if error is None:
                self._on_loaded(model, declared)
            _to_client(answer)(error)

        self._models.begin(LoadOperation(model, answered, read, failure, True, is_last_word, prepare=prepare))

    def _look(self, model: str) -> _Found:
        """What is declared of a model and of those of its steps, the model first. In any thread."""
        found: _Found = {}

        def read(name: str) -> Sequence[ModelSpec]:
            try:
                found[name] = specs = self._models.table.repository.read(name)
            except GpuserveError as error:
                found[name] = error
                return ()
            return specs

        members(model, read)
        return found

    def _load_members(self, members_of: Sequence[str], failure: Failure, then: Answer) -> None:
        """Load those of an ensemble's models that are not."""
        if (refusal := self._life.why_not_now()) is not None:  # the server has begun to end meanwhile
            then(refusal)
            return
        missing = [one for one in members_of if not self._models.table.is_served(one)]
        first = _AllLoaded(len(missing), then)
        for one in missing:
            self.load(one, {}, first.answered, failure=failure)
        if not missing:
            then(None)

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
