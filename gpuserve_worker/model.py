"""``Model``: what a worker serves. A loaded callable and what was declared of it; nothing is run here."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpuserve_worker.callable import InferenceCallable
from gpuserve_worker.context import ModelContext
from gpuserve_worker.tensor import TensorSpec

if TYPE_CHECKING:
    from gpuserve_worker.cuda.device import Device


class Model(NamedTuple):
    """A model as its worker knows it.

    ``slots`` is how many batches it takes at once. ``concurrent``: it is run by ``async_loop.py``,
    because its callable awaits or yields; otherwise by ``loop.py``. ``device`` is None in a worker that has
    none, or cannot use it.
    """

    context: ModelContext
    call: InferenceCallable
    strict: bool
    read_only_inputs: bool
    slots: int = 1
    concurrent: bool = False
    device: Device | None = None

    @property
    def name(self) -> str:
        """The model's name."""
        return self.context.name

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The declared outputs."""
        return self.context.outputs

    @property
    def batching(self) -> bool:
        """Whether axis 0 is the batch axis."""
        return self.context.batching
