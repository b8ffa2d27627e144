"""Which inputs of a model its workers copy to their device: what they are handed is read once, and never
written to. Pure; where tensors lie is ``gather.py``'s to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpuserve.front.endpoint.v2 import InputTensor
from gpuserve.front.plane.export_memory import LentExport
from gpuserve.spec import ModelSpec
from gpuserve_worker.memory import Block
from gpuserve_worker.tensor import BYTES

#: What an instance on no device has.
NO_INPUTS: Final[frozenset[str]] = frozenset()
_CPU: Final = "cpu"
_GPU: Final = "gpu"


class DeviceInputs:
    """The inputs of one model that go to a device, by instance."""

    def __init__(self, spec: ModelSpec) -> None:
        to_device = {one.name for one in spec.inputs if one.memory == _GPU and one.datatype != BYTES}
        names = frozenset(to_device) or NO_INPUTS
        self._by_instance = {one.name: names for one in spec.instances if one.device != _CPU}
        #: Those that are on a device.
        self.instances = frozenset(self._by_instance)
        is_everywhere = bool(self.instances) and len(self.instances) == len(spec.instances)
        #: Those that no instance is handed as memory of the host.
        self.everywhere = names if is_everywhere else NO_INPUTS

    def resize(self, spec: ModelSpec) -> None:
        """The model has other instances, on the devices that it had; those that were are still known."""
        names = next(iter(self._by_instance.values()), NO_INPUTS)
        self._by_instance |= {one.name: names for one in spec.instances if one.device != _CPU}
        self.instances = frozenset(self._by_instance)

    def at(self, instance: str) -> frozenset[str]:
        """The inputs that this instance copies to its device."""
        return self._by_instance.get(instance, NO_INPUTS)

    def spare(self, inputs: Iterable[InputTensor]) -> bool:
        """Whether no callable can write to the blocks that these lie in, whichever instance runs them."""
        return bool(self.everywhere) and all(
            not isinstance(one.data, Block) or (one.name in self.everywhere and not _is_given_away(one.data))
            for one in inputs
        )


def _is_given_away(data: Block) -> bool:
    """Whether a callable may be given these very bytes on its device."""
    return isinstance(data, LentExport) and not data.shared
