"""What a reload of the config does to one model: load it, scale it or unload it. Its caller has the order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from gpuserve.devices.server_devices import ServerDevices
from gpuserve.errors import DeviceError, InvalidArgument, RequestError
from gpuserve.spec import ModelSpec
from gpuserve.supervisor.load_requests import only_its_program
from gpuserve.supervisor.model_operations import Answer, Load, Unload, failed_version
from gpuserve.supervisor.reload.changes import Action, even_count
from gpuserve.supervisor.served_models import ServedModels

logger = logging.getLogger(__name__)


class ConfigWork:
    """Does to the server's own models what a config says. ``devices`` places them."""

    def __init__(
        self, models: ServedModels, is_attached: Callable[[str], bool], devices: ServerDevices
    ) -> None:
        self._models = models
        self._is_attached = is_attached
        self._devices = devices

    def is_served(self, model: str) -> bool:
        """Whether requests for a model are for any of its versions."""
        return self._models.is_served(model)

    def can_scale(self, specs: Sequence[ModelSpec]) -> bool:
        """Whether models of which only the numbers of instances are others can have these numbers in place:
        one for all devices.
        """
        try:
            return even_count(self._placed(specs)) is not None
        except RequestError:  # said when it is loaded
            return False

    def begin(self, action: Action, model: str, specs: Sequence[ModelSpec], answer: Answer) -> None:
        """Do it; the versions of the model are to be these."""
        if self._is_attached(model):
            answer(only_its_program(model, "loads"))
        elif action is Action.UNLOAD:
            self._models.begin(Unload(model, answer))
        elif action is Action.SCALE:
            self._scale(model, specs, answer)
        else:
            self._models.begin(
                Load(model, answer, lambda: self._placed(specs), failed_version, replaces=True)
            )

    def _scale(self, model: str, specs: Sequence[ModelSpec], answer: Answer) -> None:
        try:
            count = even_count(self._placed(specs))
        except RequestError as error:
            answer(error)
            return
        assert count is not None, "asked by can_scale()"
        self._models.resize(model, count, answer)

    def names_changed(self, models: Sequence[str]) -> None:
        """The config has other models than before: clients are told what may be loaded now."""
        self._models.tell_known(models)

    def _placed(self, specs: Sequence[ModelSpec]) -> Sequence[ModelSpec]:
        """The versions with their devices, by another look at the machine.

        Raises:
            InvalidArgument: a device is not there, or a library for it.
        """
        try:
            return self._devices.place(specs, again=True)
        except DeviceError as error:
            raise InvalidArgument(str(error)) from None
