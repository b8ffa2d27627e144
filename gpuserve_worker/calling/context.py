"""What an inference callable, and the decorators over it, can know of the model that they serve. Every worker
serves one model, in one thread; where workers are threads of one process, each has its own context.
Coroutines and the threads of ``asyncio.to_thread`` inherit it. What a callable asks other models goes from
here to ``calls.py``. Nothing of requests is in here.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, Unpack

from gpuserve_worker.calling.calls import CallReply, OutgoingCalls, outputs_of
from gpuserve_worker.calling.metrics import MetricRegistry
from gpuserve_worker.calling.questions import (
    LOAD,
    READY,
    UNLOAD,
    CallOptions,
    ModelCommand,
    call_request,
    command,
)
from gpuserve_worker.protocol.tensor import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays: TypeAlias = dict[str, NDArray[Any]]


def _print(level: int, text: str) -> None:
    """Where log lines go without a server."""
    sys.stderr.write(f"{text}\n")


class ModelContext(NamedTuple):
    """A model, and the instance of it that runs here. ``max_batch_size`` 0: it does not batch. ``array`` is
    the kind of array that inputs come as: "numpy", "cupy" or "torch".
    """

    name: str
    version: int
    instance: str
    device: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    preferred_batch_sizes: tuple[int, ...]
    decoupled: bool
    calls: OutgoingCalls = OutgoingCalls()
    array: str = "numpy"
    metrics: MetricRegistry = MetricRegistry()
    #: Adds a line to the server's log, at a level of ``logging``.
    log: Callable[[int, str], None] = _print

    @property
    def batching(self) -> bool:
        """Whether axis 0 of every tensor is the batch axis."""
        return self.max_batch_size > 0

    def infer(self, model: str, inputs: Mapping[str, Any], **options: Unpack[CallOptions]) -> Arrays:
        """Ask another model of this server, and wait for its answer: its outputs by name.

        ``inputs`` are arrays by name, with the batch axis in front where that model batches. Any thread may
        ask. In a callable that awaits or yields, use ``infer_async``: here all that runs beside it waits too.
        ``options`` are those of ``CallOptions``.

        Raises:
            ModelCallError: no answer; its ``code`` is what a client would have been told.
        """
        asked = call_request(model, inputs, stream=False, blocks=True, **options)
        call = self.calls.ask(asked)
        try:
            return outputs_of(call.take(), asked)
        finally:
            self.calls.forget(call)

    async def infer_async(
        self, model: str, inputs: Mapping[str, Any], **options: Unpack[CallOptions]
    ) -> Arrays:
        """As ``infer``, while other work of the event loop goes on."""
        asked = call_request(model, inputs, stream=False, blocks=False, **options)
        call = self.calls.ask(asked)
        try:
            return outputs_of(await call.take_async(), asked)
        finally:
            self.calls.forget(call)

    def stream(
        self, model: str, inputs: Mapping[str, Any], **options: Unpack[CallOptions]
    ) -> Iterator[Arrays]:
        """The responses of a decoupled model, one after the other; raises as ``infer``."""
        asked = call_request(model, inputs, stream=True, blocks=True, **options)
        call = self.calls.ask(asked)
        try:
            while (reply := call.take()).outputs is not None or reply.error is not None:
                yield outputs_of(reply, asked)
        finally:
            self.calls.forget(call)

    async def stream_async(
        self, model: str, inputs: Mapping[str, Any], **options: Unpack[CallOptions]
    ) -> AsyncIterator[Arrays]:
        """As ``stream``, while other work of the event loop goes on."""
        asked = call_request(model, inputs, stream=True, blocks=False, **options)
        call = self.calls.ask(asked)
        try:
            while (reply := await call.take_async()).outputs is not None or reply.error is not None:
                yield outputs_of(reply, asked)
        finally:
            self.calls.forget(call)

    def load_model(self, model: str, *, config: str = "") -> None:
        """Load a model of the server, or load it anew, until it is served; ``config``, as JSON, changes its
        declaration. A model can do that only where clients can: with ``model_control: explicit``.

        Raises:
            ModelCallError: it was not loaded.
        """
        self._command(command(LOAD, model, **({"config": config} if config else {})))

    def unload_model(self, model: str, *, unload_dependents: bool = False) -> None:
        """Unload a model of the server, until its workers have ended; those of the model itself end later.

        Raises:
            ModelCallError: it was not unloaded.
        """
        self._command(command(UNLOAD, model, unload_dependents=unload_dependents))

    def is_model_ready(self, model: str, *, version: str | int = "") -> bool:
        """Whether a model takes requests; of no version, the newest.

        Raises:
            ModelCallError: a version is a number above 0.
        """
        return bool(self._command(command(READY, model, version=str(version))).parameters.get(READY))

    def _command(self, asked: ModelCommand) -> CallReply:
        call = self.calls.ask(asked)
        try:
            reply = call.take()
            if reply.error is not None:
                raise reply.error
            return reply
        finally:
            self.calls.forget(call)


_CURRENT: Final[ContextVar[ModelContext | None]] = ContextVar("gpuserve_model", default=None)


def enter_model(context: ModelContext) -> None:
    """Let the calling thread serve this model from now on."""
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


#: What callables have that no server calls: they can ask nobody, and count for themselves.
ALONE: Final = ModelContext("", 0, "", "cpu", (), (), 0, (), False)


def current_metrics() -> MetricRegistry:
    """The metrics of the model that is served here, or some that nobody is told of."""
    return (_CURRENT.get() or ALONE).metrics
