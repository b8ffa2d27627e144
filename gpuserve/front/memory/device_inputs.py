"""Which inputs of a model its workers copy to their device: what is read once, and never written to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpuserve.front.links.export_memory import LentExport
from gpuserve.front.requests.inference import InputTensor
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.tensor import BYTES

#: What an instance on no device has.
NO_INPUTS: Final[frozenset[str]] = frozenset()
_CPU: Final = "cpu"
_GPU: Final = "gpu"


class DeviceInputs:
    """The names of the inputs that go to a device, by instance; ``everywhere``: never as host memory."""

    def __init__(self, spec: ModelSpec) -> None:
        to_device = {one.name for one in spec.inputs if one.memory == _GPU and one.datatype != BYTES}
        names = frozenset(to_device) or NO_INPUTS
        self.by_instance = {one.name: names for one in spec.instances if one.device != _CPU}
        self.instances = frozenset(self.by_instance)
        is_everywhere = bool(self.instances) and len(self.instances) == len(spec.instances)
        self.everywhere = names if is_everywhere else NO_INPUTS

    def resize(self, spec: ModelSpec) -> None:
        """The model has other instances, on the devices that it had; those that were are still known."""
        names = next(iter(self.by_instance.values()), NO_INPUTS)
        self.by_instance |= {one.name: names for one in spec.instances if one.device != _CPU}
        self.instances = frozenset(self.by_instance)

    def spare(self, inputs: Iterable[InputTensor]) -> bool:
        """Whether no callable can write to the blocks that these lie in, whichever instance runs them."""
        return bool(self.everywhere) and all(
            not isinstance(one.data, Block) or (one.name in self.everywhere and not _is_given_away(one.data))
            for one in inputs
        )


def _is_given_away(data: Block) -> bool:
    """Whether a callable may be given these very bytes on its device."""
    return isinstance(data, LentExport) and not data.shared
