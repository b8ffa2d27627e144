"""Whether a model can run a request that names memory of a device: an instance must be on that very device.
Pure. Which instance it becomes is for ``devices.py`` to say.
"""

from __future__ import annotations

from gpuserve.front.endpoint.v2 import InferRequest
from gpuserve.front.scheduler import refusals
from gpuserve.front.scheduler.instances import Instances
from gpuserve.spec import ModelSpec


class DeviceCheck:
    """The check of one model's requests that name regions."""

    def __init__(self, spec: ModelSpec, instances: Instances) -> None:
        self._name = spec.name
        self._devices = sorted({one.device for one in spec.instances})
        self._stays = spec.in_sequences and len(self._devices) > 1
        self._instances = instances

    def check(self, request: InferRequest) -> None:
        """Do nothing where the model has, or will soon have, an instance for it.

        Raises:
            InvalidArgument: its regions are not of one device, or of one that the model is not on.
            Unavailable: no instance on that device is to be had soon.
        """
        named = sorted({one.device for one in request.regions if one.device})
        if not named:
            return
        device = named[0]
        if len(named) > 1:
            raise refusals.several_devices(named)
        if device not in self._devices:
            raise refusals.other_device(self._name, device, self._devices)
        if self._stays:  # a sequence stays at the instance that it began at, whichever that is
            raise refusals.device_in_sequences(self._name, device, self._devices)
        if self._instances.none_is_due(device):
            raise refusals.none_on_device(self._name, device)
