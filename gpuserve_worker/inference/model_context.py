"""The context of an inference callable: the model that the current worker serves, and its metrics.

Every worker serves one model in one thread. Where workers are threads of one process, each has its own
context. Coroutines and threads of ``asyncio.to_thread`` inherit the context.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, Unpack

from gpuserve_worker.inference.callable_metrics import Metric, MetricKind, MetricRegistry
from gpuserve_worker.inference.model_calls import (
    LOAD,
    READY,
    UNLOAD,
    CallOptions,
    CallReply,
    ModelCommand,
    OutgoingCalls,
    call_request,
    command,
    outputs_of,
)
from gpuserve_worker.protocol.tensor import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays: TypeAlias = dict[str, NDArray[Any]]


class ModelContext(NamedTuple):
    """A model, and its instance in this worker. ``max_batch_size`` 0 means that the model does not batch.
    ``array`` is the kind of input arrays: "numpy", "cupy" or "torch".
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
    #: Function that adds a line to the server's log, at a level of ``logging``; stderr without a server.
    log: Callable[[int, str], object] = lambda _level, text: sys.stderr.write(f"{text}\n")

    @property
    def batching(self) -> bool:
        """True if axis 0 of every tensor is the batch axis."""
        return self.max_batch_size > 0

    def infer(self, model: str, inputs: Mapping[str, Any], **options: Unpack[CallOptions]) -> Arrays:
        """Call another model of this server and return its outputs by name.

        Any thread may call. A callable that awaits or yields uses ``infer_async`` instead, because this
        method blocks its event loop.

        Args:
            model: name of the model.
            inputs: arrays by name, with the batch axis first if that model batches.
            options: those of ``CallOptions``.

        Raises:
            ModelCallError: no answer; its ``code`` is the code that a client would receive.
        """
        asked = call_request(model, inputs, stream=False, blocks=True, **options)
        call = self.calls.ask(asked)
        try:
            return outputs_of(call.next_reply(), asked)
        finally:
            self.calls.forget(call)

    async def infer_async(
        self, model: str, inputs: Mapping[str, Any], **options: Unpack[CallOptions]
    ) -> Arrays:
        """Call another model as ``infer``, while other tasks of the event loop run."""
        asked = call_request(model, inputs, stream=False, blocks=False, **options)
        call = self.calls.ask(asked)
        try:
            return outputs_of(await call.next_reply_async(), asked)
        finally:
            self.calls.forget(call)

    def stream(
        self, model: str, inputs: Mapping[str, Any], **options: Unpack[CallOptions]
    ) -> Iterator[Arrays]:
        """Return an iterator over the responses of a decoupled model. Raises as ``infer``."""
        asked = call_request(model, inputs, stream=True, blocks=True, **options)
        call = self.calls.ask(asked)
        try:
            while (reply := call.next_reply()).outputs is not None or reply.error is not None:
                yield outputs_of(reply, asked)
        finally:
            self.calls.forget(call)

    async def stream_async(
        self, model: str, inputs: Mapping[str, Any], **options: Unpack[CallOptions]
    ) -> AsyncIterator[Arrays]:
        """Return an async iterator as ``stream``, while other tasks of the event loop run."""
        asked = call_request(model, inputs, stream=True, blocks=False, **options)
        call = self.calls.ask(asked)
        try:
            while (reply := await call.next_reply_async()).outputs is not None or reply.error is not None:
                yield outputs_of(reply, asked)
        finally:
            self.calls.forget(call)

    def load_model(self, model: str, *, config: str = "") -> None:
        """Load or reload a model of the server, and return when it is served.

        Args:
            config: changes of the model's declaration, as JSON; "" for none.

        Allowed with ``model_control: explicit``, as for clients.

        Raises:
            ModelCallError: the model was not loaded.
        """
        self._command(command(LOAD, model, **({"config": config} if config else {})))

    def unload_model(self, model: str, *, unload_dependents: bool = False) -> None:
        """Unload a model of the server, and return when its workers have ended. Workers of the calling model
        end later.

        Raises:
            ModelCallError: the model was not unloaded.
        """
        self._command(command(UNLOAD, model, unload_dependents=unload_dependents))

    def is_model_ready(self, model: str, *, version: str | int = "") -> bool:
        """Return whether a model accepts requests; "" means its newest version.

        Raises:
            ModelCallError: ``version`` is not a number above 0.
        """
        return bool(self._command(command(READY, model, version=str(version))).parameters.get(READY))

    def _command(self, asked: ModelCommand) -> CallReply:
        call = self.calls.ask(asked)
        try:
            reply = call.next_reply()
            if reply.error is not None:
                raise reply.error
            return reply
        finally:
            self.calls.forget(call)


_CURRENT: Final[ContextVar[ModelContext | None]] = ContextVar("gpuserve_model", default=None)


def enter_model(context: ModelContext) -> None:
    """Set the model that the calling thread serves."""
    _CURRENT.set(context)


def current_model() -> ModelContext:
    """Return the context of the model that this thread serves.

    Raises:
        LookupError: no worker called this code, for example a callable in a unit test.
    """
    context = _CURRENT.get()
    if context is None:
        raise LookupError("no model is served here: the inference callable was not called by a server")
    return context


#: Context of callables without a server: they can call no model, and their metrics are not sent.
ALONE: Final = ModelContext("", 0, "", "cpu", (), (), 0, (), False)


def current_metrics() -> MetricRegistry:
    """Return the metrics of the model that is served here, or a registry whose metrics are not sent."""
    return (_CURRENT.get() or ALONE).metrics


class MetricFamily:
    """Metrics of one name on the server's metrics page, shared by all instances of all models.

    ``kind`` is ``MetricFamily.COUNTER``, ``GAUGE`` or ``HISTOGRAM``. Create the family in the callable's own
    thread, best while the model loads; any thread may use the metrics.

    Raises:
        MetricError: the name is invalid, or the family exists with another kind.
    """

    COUNTER: Final = MetricKind.COUNTER
    GAUGE: Final = MetricKind.GAUGE
    HISTOGRAM: Final = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._registry = current_metrics()
        self._family = self._registry.family(name, description, kind)

    def metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric with these labels, the same object for the same labels.

        Args:
            labels: label values by name, none by default.
            buckets: ascending upper bounds of a histogram's buckets; an unbounded bucket follows them.

        Raises:
            MetricError: invalid labels or buckets, or the instance has the maximum number of metrics.
        """
        return self._registry.series(self._family, labels, buckets)
