"""``LocalModel``: a model that is loaded in this process, and asked without a server."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, TypeVar, Unpack

import numpy as np

from gpuserve.front.batching.refusals import no_stream
from gpuserve.front.v2.validation import check_of
from gpuserve.model.spec import ModelSpec
from gpuserve.testing.answers import Outputs, answers_of
from gpuserve.testing.others import OtherModels
from gpuserve.testing.requests import LocalRequest, batch_of, local_request
from gpuserve_worker.calling.callable import InferenceCallable, build, locate
from gpuserve_worker.calling.calls import CallReply
from gpuserve_worker.calling.context import ModelContext, enter_model
from gpuserve_worker.calling.metrics import MetricRegistry
from gpuserve_worker.calling.outputs import OutputError, OutputRules
from gpuserve_worker.calling.questions import CallOptions, CallRequest, ModelCallError
from gpuserve_worker.calling.request import accepts_batch
from gpuserve_worker.calling.results import await_only_result, is_deferred
from gpuserve_worker.protocol.wire import WireRequest

Found = TypeVar("Found")

_END: Final = object()


class LocalModel:
    """A model that is asked as its worker would, in the calling thread; where that runs an event loop, in
    another one. ``log`` has the lines that it logged, each with a level of ``logging``. Errors of
    ``execute``, or of the callable, are raised as they are.
    """

    def __init__(self, spec: ModelSpec, source: Mapping[str, Any], others: OtherModels) -> None:
        self.spec = spec
        self.others = others
        self.log: list[tuple[int, str]] = []
        self._source = dict(source)
        self._check = check_of(spec)
        self._context = contextvars.copy_context()
        self._loop = asyncio.Runner()
        self._call: InferenceCallable | None = None
        self._rules = OutputRules(
            spec.name,
            spec.outputs,
            batching=spec.max_batch_size > 0,
            strict=spec.strict,
            exact=spec.exact,
            decoupled=spec.decoupled,
        )

    def __enter__(self) -> LocalModel:
        self.load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self) -> None:
        """Import and make the callable; raises ``LoadError``."""

        def make() -> InferenceCallable:
            enter_model(self._model_context())
            may_yield = self.spec.decoupled or self.spec.exact or not self.spec.strict
            return build(locate(self._source), self._source, "cpu", may_yield=may_yield)

        self._call = _beside_a_loop(lambda: self._context.run(make))
        self.others.calls.open(self.others)

    def close(self) -> None:
        """Let the callable hear of its end, as it does when a worker stops."""
        self.others.calls.close("the model under test has ended")
        close = getattr(self._call, "close", None)
        if close is not None:
            _beside_a_loop(lambda: self._context.run(close))
        self._call = None
        _beside_a_loop(self._loop.close)

    def infer(self, inputs: Mapping[str, Any], **options: Unpack[CallOptions]) -> Outputs:
        """The outputs for one request; ``options`` are those of ``ModelContext.infer``.

        Raises:
            ModelCallError: a server would refuse the request, the model did, or its answer cannot be sent.
        """
        return self.infer_batch([inputs], **options)[0]

    def infer_batch(
        self, inputs: Sequence[Mapping[str, Any]], **options: Unpack[CallOptions]
    ) -> list[Outputs]:
        """The outputs for several requests that are answered in one call; raises as ``infer``, for the
        first, and WrongCall where a server would not put them into one batch.
        """
        return outputs_of(self.answers([local_request(one, **options) for one in inputs]))

    def stream(self, inputs: Mapping[str, Any], **options: Unpack[CallOptions]) -> list[Outputs]:
        """All responses of a decoupled model to one request; raises as ``infer``."""
        return list(self.responses(local_request(inputs, **options)))

    def responses(self, request: LocalRequest) -> Iterator[Outputs]:
        """The responses to one request, each when it is asked for; raises as ``infer``."""
        if not self.spec.decoupled:
            yield from outputs_of(self.answers([request]))
            return
        for (one,) in self.steps([request]):
            yield from outputs_of([one])

    def answers(self, requests: Sequence[LocalRequest]) -> list[Outputs | ModelCallError | None]:
        """The answer to each request of a batch, or what it failed with."""
        batch, told = batch_of(self.spec, self._check, requests)
        if self.spec.decoupled:
            refused = no_stream(self.spec.name)
            raise ModelCallError(refused.code.value, str(refused))
        result = self._called(batch)
        if is_deferred(result):
            result = self._awaited(lambda: await_only_result(result))
        return self._checked(result, told)

    def steps(self, requests: Sequence[LocalRequest]) -> Iterator[list[Outputs | ModelCallError | None]]:
        """What a decoupled model yields, step by step: the response to each request, None for none."""
        batch, told = batch_of(self.spec, self._check, requests)
        for one in self._results(self._called(batch)):
            yield self._checked(one, told)

    def answer_call(self, request: CallRequest) -> list[CallReply]:
        """Answer another local model that asks this one."""
        asked = asked_of(request)
        if not self.spec.decoupled:
            return replies_of(self.answers([asked]), request)
        if not request.stream:
            raise ModelCallError("UNIMPLEMENTED", f"model {self.spec.name!r} is decoupled")
        return replies_of([one for (one,) in self.steps([asked]) if one is not None], request)

    def _checked(self, result: Any, requests: Sequence[WireRequest]) -> list[Outputs | ModelCallError | None]:
        try:
            return list(answers_of(self._rules.check(result, requests), requests))
        except OutputError as error:
            raise ModelCallError("INTERNAL", str(error)) from None

    def _called(self, batch: Any) -> Any:
        call = self._call
        if call is None:
            raise RuntimeError(
                f"model {self.spec.name!r} is not loaded: use it in a with block, or load() it"
            )
        given = batch if accepts_batch(call) else batch.as_list()
        return _beside_a_loop(lambda: self._context.run(call, given))

    def _results(self, result: Any) -> Iterator[Any]:
        """All that a call gives, whichever kind of callable it is, each when it is asked for."""
        if isinstance(result, AsyncIterator):
            yield from self._awaited_each(result)
        elif isinstance(result, Iterator):
            try:
                while (one := self._next(result)) is not _END:
                    yield one
            finally:
                _beside_a_loop(lambda: self._context.run(getattr(result, "close", bool)))
        else:
            yield self._awaited(lambda: result) if asyncio.iscoroutine(result) else result

    def _next(self, iterator: Iterator[Any]) -> Any:
        return _beside_a_loop(lambda: self._context.run(next, iterator, _END))

    def _awaited_each(self, iterator: AsyncIterator[Any]) -> Iterator[Any]:
        async def following() -> Any:
            return await anext(iterator, _END)

        try:
            while (one := self._awaited(following)) is not _END:
                yield one
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                self._awaited(close)

    def _awaited(self, begin: Callable[[], Any]) -> Any:
        async def awaiting() -> Any:
            return await begin()

        return _beside_a_loop(lambda: self._loop.run(awaiting(), context=self._context))

    def _model_context(self) -> ModelContext:
        spec = self.spec
        return ModelContext(
            spec.name,
            spec.version,
            spec.instances[0].name if spec.instances else "cpu#0",
            "cpu",
            spec.inputs,
            spec.outputs,
            spec.max_batch_size,
            spec.batching.preferred_batch_sizes,
            spec.decoupled,
            self.others.calls,
            "numpy",
            MetricRegistry(),
            lambda level, text: self.log.append((level, text)),
        )


def outputs_of(answers: Sequence[Outputs | ModelCallError | None]) -> list[Outputs]:
    """The answers that are none but outputs; raises the first error among them."""
    for one in answers:
        if isinstance(one, ModelCallError):
            raise one
    return [one for one in answers if isinstance(one, Outputs)]


def asked_of(call: CallRequest) -> LocalRequest:
    """The request that a call of another model is."""
    arrays = {name: np.asarray(value) for name, value in call.inputs.items()}
    return LocalRequest(
        arrays, call.parameters, call.requested_outputs, call.request_id, call.timeout_s, call.sequence
    )


def replies_of(answers: Sequence[Outputs | ModelCallError | None], call: CallRequest) -> list[CallReply]:
    """The answers to a call as its replies, the last of which is final."""
    replies = [_reply(one, final=not call.stream) for one in answers]
    return [*replies, CallReply(None, {}, None, True)] if call.stream else replies


def _reply(answer: Outputs | ModelCallError | None, *, final: bool) -> CallReply:
    if isinstance(answer, ModelCallError):
        return CallReply(None, {}, answer, True)
    return CallReply(dict(answer or {}), {} if answer is None else answer.parameters, None, final)


def _beside_a_loop(call: Callable[[], Found]) -> Found:
    """What a call gives: here, or in a thread of its own where this one runs an event loop, as that of a
    notebook does. No worker has one where it calls what does not await.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
