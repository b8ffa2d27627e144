"""What an inference callable, and the decorators over it, can know of the model that they serve.

Every worker serves one model, in one thread; where workers are threads of one process, each has its own
context. Coroutines and the threads of ``asyncio.to_thread`` inherit it. Nothing of requests is in here.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, NamedTuple

from gpuserve_worker.tensor import TensorSpec


class ModelContext(NamedTuple):
    """A model, and the instance of it that runs here. ``max_batch_size`` 0: it does not batch."""

    name: str
    version: int
    instance: str
    device: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    preferred_batch_sizes: tuple[int, ...]
    decoupled: bool

    @property
    def batching(self) -> bool:
        """Whether axis 0 of every tensor is the batch axis."""
        return self.max_batch_size > 0


_CURRENT: Final[ContextVar[ModelContext | None]] = ContextVar("gpuserve_model", default=None)


def enter_model(context: ModelContext) -> None:
    """The calling thread serves this model from now on."""
    _CURRENT.set(context)


def current_model() -> ModelContext:
    """The model that is served here.

    Raises:
        LookupError: the caller does not run in a worker: a callable that is called by hand.
    """
    context = _CURRENT.get()
    if context is None:
        raise LookupError("no model is served here: the inference callable was not called by a server")
    return context
