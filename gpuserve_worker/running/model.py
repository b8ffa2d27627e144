"""``Model``: a loaded callable, what was declared of it, and its device. Nothing is run here."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpuserve_worker.calling.callable import InferenceCallable
from gpuserve_worker.calling.context import ModelContext

if TYPE_CHECKING:
    from gpuserve_worker.running.device_path import WorkerDevicePath


class Model(NamedTuple):
    """A model as its worker knows it. ``slots`` is how many batches it takes at once; ``concurrent``: its
    callable awaits or yields; ``all_lines``: clients are told every line of what it raises.
    """

    context: ModelContext
    call: InferenceCallable
    path: WorkerDevicePath
    strict: bool
    exact: bool
    read_only_inputs: bool
    slots: int = 1
    concurrent: bool = False
    all_lines: bool = False

    @property
    def name(self) -> str:
        return self.context.name
