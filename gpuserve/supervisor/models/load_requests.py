"""Loads and unloads by a model's name, as clients and operators request them: from the name to operations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from gpuserve.core.errors import (
    AlreadyExists,
    DeviceError,
    GpuserveError,
    NotFound,
    RequestError,
    Unavailable,
)
from gpuserve.model.placement import ServerDevices
from gpuserve.model.spec import ModelSpec, ensemble_members
from gpuserve.model.spec_changes import changed
from gpuserve.supervisor.attach.attached_programs import AttachedModels
from gpuserve.supervisor.models.model_operations import (
    Failure,
    LoadOperation,
    OnDone,
    UnloadOperation,
    cannot_poll,
    refused_load,
)
from gpuserve.supervisor.models.served_models import ServedModels
from gpuserve.supervisor.processes.front_monitor import Answer as ClientAnswer
from gpuserve.supervisor.processes.lifecycle import ServerLifecycle

logger = logging.getLogger(__name__)

#: Models found by name: their versions, or the error of their declaration.
_Declarations: TypeAlias = dict[str, Sequence[ModelSpec] | GpuserveError]
#: Makes the error of a model that cannot be read; None instead of an error: no model of that name is
#: declared.
Unreadable: TypeAlias = Callable[[str, GpuserveError | None], RequestError]


def cannot_be_read(model: str, error: GpuserveError | None) -> RequestError:
    """Return the error for a client, which must not see the content of files, and log the rest."""
    if isinstance(error, RequestError):
        return error
    if error is None:
        return NotFound(str(cannot_poll(model)))
    logger.error("model %s cannot be loaded: %s", model, error)
    return cannot_poll(model)


@dataclass(eq=False)
class LoadRequests:
    """Loads and unloads by name. Models of attached programs are refused, because only their programs may
    change them. ``run_in_background`` reads declarations, which may run callables to describe their tensors.
    ``on_loaded`` is called with each model that was loaded, and its declaration.
    """

    _lifecycle: ServerLifecycle
    _models: ServedModels
    _attached: AttachedModels
    _devices: ServerDevices
    _run_in_background: Callable[
        [Callable[[], _Declarations], Callable[[_Declarations | GpuserveError], None]], None
    ]
    _on_loaded: Callable[[str, Sequence[ModelSpec]], None]

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
        """Load every version of a model as it is declared now, with ``changes``; first the models of an
        ensemble's steps that are not loaded. Without ``again``, answer ``AlreadyExists`` if the model is
        loaded by the time of its turn.
        """
        refusal = self._lifecycle.change_refusal() or self._attached.attached_refusal(model, "loads")
        if refusal is not None:
            answer(refusal)
            return
        declared: list[ModelSpec] = []

        def prepare(then: OnDone) -> None:
            if not again and self._models.table.is_served(model):
                then(AlreadyExists(f"model '{model}' is loaded already"))
            else:
                self._run_in_background(partial(self._read_declarations, model), partial(prepared, then))

        def prepared(then: OnDone, found: _Declarations | GpuserveError) -> None:
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
                return self._devices.place(specs, again=True, beside=self._models.table.specs())
            except DeviceError as error:
                raise failure(specs[0], "", str(error)) from None

        def answered(error: GpuserveError | None) -> None:
            if error is None:
                self._on_loaded(model, declared)
            _to_client(answer)(error)

        self._models.submit(
            LoadOperation(model, answered, read, failure, True, is_last_word, wakes=True, prepare=prepare)
        )

    def _read_declarations(self, model: str) -> _Declarations:
        """Return the declarations of a model and of the models of its steps, the model first. Thread-safe."""
        found: _Declarations = {}

        def read(name: str) -> Sequence[ModelSpec]:
            try:
                found[name] = specs = self._models.table.repository.read(name)
            except GpuserveError as error:
                found[name] = error
                return ()
            return specs

        ensemble_members(model, read)
        return found

    def _load_members(self, member_names: Sequence[str], failure: Failure, then: OnDone) -> None:
        if (refusal := self._lifecycle.change_refusal()) is not None:  # the server may have begun to stop
            then(refusal)
            return
        missing = [one for one in member_names if not self._models.table.is_served(one)]
        first = _AllLoaded(len(missing), then)
        for one in missing:
            self.load(one, {}, first.answered, failure=failure)
        if not missing:
            then(None)

    def unload(self, model: str, answer: ClientAnswer) -> None:
        """Unload every version of a model. A model that is not loaded is no error."""
        refusal = self._lifecycle.change_refusal() or self._attached.attached_refusal(model, "unloads")
        if refusal is not None:
            answer(refusal)
        else:
            self._models.submit(UnloadOperation(model, _to_client(answer)))


class _AllLoaded:
    """A group of loads that reports once: after the last load, or after the first that fails."""

    def __init__(self, count: int, report: OnDone) -> None:
        self._left = count
        self._report: OnDone | None = report

    def answered(self, error: GpuserveError | None) -> None:
        self._left -= 1
        if self._report is not None and (error is not None or not self._left):
            report, self._report = self._report, None
            report(error)


def _to_client(answer: ClientAnswer) -> OnDone:
    def answer_client(error: GpuserveError | None) -> None:
        # An error that is not a RequestError is about the end of the server.
        answer(error if error is None or isinstance(error, RequestError) else Unavailable("Server exiting"))

    return answer_client
