"""The devices of one server: from models as they are declared to models whose instances have their devices. A
look at the machine is taken when the first model that names a GPU is placed, and once more for models that
are loaded later. Numbers stay what they were at the first look.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from gpuserve.devices.names import CPU
from gpuserve.devices.placement import ANYWHERE, Placement, placement_on
from gpuserve.errors import DeviceError
from gpuserve.model.spec import MAX_INSTANCES, InstanceSpec, ModelSpec
from gpuserve.placement.libraries import missing_library

if TYPE_CHECKING:
    from gpuserve.devices.inventory import DriverReader, Inventory, VisibleDevice


class ServerDevices:
    """What a server knows of its machine's devices, for any thread. ``numa_affinity``: workers stay beside
    their GPU.
    """

    def __init__(self, look: DriverReader | None = None, *, numa_affinity: bool = True) -> None:
        self._look = look
        self._numa_affinity = numa_affinity
        self._looking = threading.Lock()
        self._known: Inventory | None = None

    def inventory(self, *, again: bool = False) -> Inventory:
        """What was found before, or by another look; ``DeviceError`` where the driver does not answer."""
        from gpuserve.devices.inventory import DriverReader  # a server without a GPU does without

        with self._looking:
            self._look = self._look or DriverReader()
            if self._known is None:
                self._known = self._look.read()
            elif again:
                self._known = self._look.read().numbered_as(self._known)
            return self._known

    def devices_named(self, text: str) -> Sequence[VisibleDevice]:
        """The devices behind a name, none for "cpu"; ``DeviceError`` says what there is instead."""
        if text == CPU:
            return ()
        from gpuserve.devices.inventory import devices_named  # as above

        return devices_named(text, self.inventory())

    def place(self, specs: Iterable[ModelSpec], *, again: bool = False) -> list[ModelSpec]:
        """The models with a device for each instance; those that are placed already stay as they are. With
        ``again`` the machine is looked at once more, where any of them needs a GPU. Raises DeviceError: a
        model names a device that is not there, or needs a library that is not.
        """
        models = list(specs)
        if again and any(_is_unplaced(one) for model in models for one in model.instances):
            self.inventory(again=True)
        return [self._place(one) for one in models]

    def _place(self, spec: ModelSpec) -> ModelSpec:
        if missing := missing_library(spec):
            raise DeviceError(f"model {spec.name!r}: {missing}")
        if not any(map(_is_unplaced, spec.instances)):
            return spec
        try:
            instances = [placed for one in spec.instances for placed in self._spread(one)]
        except DeviceError as error:
            raise DeviceError(f"model {spec.name!r}: {error}") from None
        if len(instances) > MAX_INSTANCES:
            raise DeviceError(
                f"model {spec.name!r}: its instances on every GPU are {len(instances)}, but a model may have "
                f"{MAX_INSTANCES} at most"
            )
        return dataclasses.replace(spec, instances=tuple(_named(instances, spec.instances)))

    def _spread(self, instance: InstanceSpec) -> Iterator[InstanceSpec]:
        """One instance for each device that it names. A worker thread has the GPUs of its process."""
        if not _is_unplaced(instance):
            yield instance
            return
        for device in self.devices_named(instance.device):
            placement = placement_on(device, numa_affinity=self._numa_affinity)
            if "object" in instance.source:
                placement = Placement(device.uuid)
            yield dataclasses.replace(instance, device=device.name, placement=placement)


def _is_unplaced(instance: InstanceSpec) -> bool:
    return instance.device != CPU and instance.placement == ANYWHERE


def _named(instances: Iterable[InstanceSpec], declared: Sequence[InstanceSpec]) -> Iterator[InstanceSpec]:
    """With names for their devices: numbered on each where the declared ones are, or else by position."""
    on_device = all(one.name.startswith(f"{one.device}#") for one in declared)
    counts: Counter[str] = Counter()
    for one in instances:
        place = one.device if on_device else ""
        name = f"{place}#{counts[place]}" if on_device else f"{counts[place]}"
        counts[place] += 1
        yield dataclasses.replace(one, name=name)
