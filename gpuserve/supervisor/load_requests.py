"""What clients ask for by the repository's endpoints: from a name to an operation on the served models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpuserve.devices.server_devices import ServerDevices
from gpuserve.errors import DeviceError, GpuserveError, InvalidArgument, RequestError, Unavailable
from gpuserve.spec import ModelSpec
from gpuserve.spec_changes import changed
from gpuserve.supervisor import front_keeper, model_operations
from gpuserve.supervisor.model_operations import Load, Unload, refused_load
from gpuserve.supervisor.repository import Repository
from gpuserve.supervisor.served_models import ServedModels


class LoadRequests:
    """Loads and unloads by name; the models of attached programs are theirs alone."""

    def __init__(
        self,
        models: ServedModels,
        is_attached: Callable[[str], bool],
        repository: Repository,
        devices: ServerDevices,
    ) -> None:
        self._models = models
        self._is_attached = is_attached
        self._repository = repository
        self._devices = devices

    def load(self, model: str, changes: dict[str, Any], answer: front_keeper.Answer) -> None:
        """Load every version of a model as it is declared now, with these changes.

        Of an ensemble, those models of its steps that are not loaded go first.
        """
        if self._is_attached(model):
            answer(_attached(model, "loads"))
            return
        tell = _to_client(answer)
        missing = self._missing_members(model)
        if missing:
            first = _AllLoaded(len(missing), lambda error: self._load_after(error, model, changes, tell))
            for one in missing:
                self._load(one, {}, first.answered)
        else:
            self._load(model, changes, tell)

    def _load_after(
        self, error: GpuserveError | None, model: str, changes: dict[str, Any], tell: model_operations.Answer
    ) -> None:
        if error is None:
            self._load(model, changes, tell)
        else:
            tell(error)

    def _load(self, model: str, changes: dict[str, Any], tell: model_operations.Answer) -> None:
        def read() -> Sequence[ModelSpec]:
            return self._placed(changed(self._repository.read(model), changes))

        self._models.begin(Load(model, tell, read, refused_load, replaces=True))

    def _placed(self, specs: Sequence[ModelSpec]) -> Sequence[ModelSpec]:
        """The versions with their devices, by another look at the machine.

        Raises:
            InvalidArgument: a device is not there.
        """
        try:
            return self._devices.place(specs, again=True)
        except DeviceError as error:
            raise refused_load(specs[0], "", str(error)) from None

    def _missing_members(self, model: str) -> list[str]:
        """The models of an ensemble's steps, and theirs, that are not loaded."""
        found: dict[str, None] = {}
        left = [model]
        while left:
            new = [one for one in self._members(left.pop()) if one not in found and one != model]
            found.update(dict.fromkeys(new))
            left += new
        return [one for one in found if not self._models.is_served(one)]

    def _members(self, model: str) -> list[str]:
        try:
            specs = self._repository.read(model)
        except GpuserveError:  # said when it is loaded
            return []
        return [step.model for spec in specs for step in spec.steps]

    def unload(self, model: str, answer: front_keeper.Answer) -> None:
        """Unload every version of a model; one that is not loaded is no error."""
        if self._is_attached(model):
            answer(_attached(model, "unloads"))
            return
        self._models.begin(Unload(model, _to_client(answer)))


class _AllLoaded:
    """Several loads, of which only the last, or the first that fails, is told on."""

    def __init__(self, count: int, tell: model_operations.Answer) -> None:
        self._left = count
        self._tell: model_operations.Answer | None = tell

    def answered(self, error: GpuserveError | None) -> None:
        """One of them is done."""
        self._left -= 1
        if self._tell is not None and (error is not None or not self._left):
            tell, self._tell = self._tell, None
            tell(error)


def _to_client(answer: front_keeper.Answer) -> model_operations.Answer:
    def answer_client(error: GpuserveError | None) -> None:
        # All that is no answer to a request is about the end of the server.
        answer(error if error is None or isinstance(error, RequestError) else Unavailable("Server exiting"))

    return answer_client


def _attached(model: str, does: str) -> InvalidArgument:
    return InvalidArgument(
        f"model '{model}' is served by an attached program, and only that program {does} its models"
    )
