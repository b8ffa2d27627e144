"""``LocalModel``: a model that is loaded in this process, and asked without a server."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

import numpy as np

from gpuserve.declare.spec import ModelSpec
from gpuserve.testing.answers import Outputs, answers_of
from gpuserve.testing.others import OtherModels
from gpuserve.testing.requests import LocalRequest, batch_of
from gpuserve_worker.calling.callable import InferenceCallable, build, locate
from gpuserve_worker.calling.calls import CallReply
from gpuserve_worker.calling.context import ModelContext, enter_model
from gpuserve_worker.calling.metrics import MetricRegistry
from gpuserve_worker.calling.outputs import OutputError, OutputRules
from gpuserve_worker.calling.questions import CallOptions, CallRequest, ModelCallError
from gpuserve_worker.calling.request import accepts_batch
from gpuserve_worker.calling.results import await_only_result, is_deferred
from gpuserve_worker.protocol.wire import WireRequest


class LocalModel:
    """A model that is asked as its worker would, in the calling thread. ``log`` has the lines that it
    logged, each with a level of ``logging``. Errors of ``execute``, or of the callable, are raised as they
    are.
    """

    def __init__(self, spec: ModelSpec, source: Mapping[str, Any], others: OtherModels) -> None:
        self.spec = spec
        self.others = others
        self.log: list[tuple[int, str]] = []
        self._source = dict(source)
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
            return build(locate(self._source), self._source, "cpu", decoupled=self.spec.decoupled)

        self._call = self._context.run(make)
        self.others.calls.open(self.others)

    def close(self) -> None:
        """Let the callable hear of its end, as it does when a worker stops."""
        self.others.calls.close("the model under test has ended")
        close = getattr(self._call, "close", None)
        if close is not None:
            self._context.run(close)
        self._call = None
        self._loop.close()

    def infer(self, inputs: Mapping[str, Any], **options: Unpack[CallOptions]) -> Outputs:
        """The outputs for one request; ``options`` are those of ``ModelContext.infer``.

        Raises:
            ValueError: a server would refuse the request.
            ModelCallError: the model refused it, or its answer cannot be sent.
        """
        return self.infer_batch([inputs], **options)[0]

    def infer_batch(
        self, inputs: Sequence[Mapping[str, Any]], **options: Unpack[CallOptions]
    ) -> list[Outputs]:
        """The outputs for several requests that are answered in one call; raises as ``infer``, for the
        first.
        """
        answers = self.answers([_request(one, **options) for one in inputs])
        for one in answers:
            if isinstance(one, ModelCallError):
                raise one
        return [one for one in answers if isinstance(one, Outputs)]

    def stream(self, inputs: Mapping[str, Any], **options: Unpack[CallOptions]) -> list[Outputs]:
        """All responses of a decoupled model to one request; raises as ``infer``."""
        found = []
        for step in self.steps([_request(inputs, **options)]):
            for one in step:
                if isinstance(one, ModelCallError):
                    raise one
                if one is not None:
                    found.append(one)
        return found

    def answers(self, requests: Sequence[LocalRequest]) -> list[Outputs | ModelCallError | None]:
        """The answer to each request of a batch, or what it failed with."""
        batch, told = batch_of(self.spec, requests)
        result = self._called(batch)
        if is_deferred(result):
            result = self._loop.run(await_only_result(result), context=self._context)
        return self._checked(result, told)

    def steps(self, requests: Sequence[LocalRequest]) -> list[list[Outputs | ModelCallError | None]]:
        """What a decoupled model yields, step by step: the response to each request, None for none."""
        batch, told = batch_of(self.spec, requests)
        results = self._loop.run(_all(self._called(batch)), context=self._context)
        return [self._checked(one, told) for one in results]

    def answer_call(self, request: CallRequest) -> list[CallReply]:
        """Answer another local model that asks this one."""
        asked = LocalRequest(
            {name: np.asarray(value) for name, value in request.inputs.items()},
            request.parameters,
            request.requested_outputs,
            request.request_id,
            request.timeout_s,
            request.sequence,
        )
        try:
            if not self.spec.decoupled:
                found = self.answers([asked])
            elif request.stream:
                found = [one for (one,) in self.steps([asked]) if one is not None]
            else:
                raise ModelCallError("UNIMPLEMENTED", f"model {self.spec.name!r} is decoupled")
        except ValueError as error:
            raise ModelCallError("INVALID_ARGUMENT", str(error)) from None
        replies = [_reply(one, final=not request.stream) for one in found]
        return [*replies, CallReply(None, {}, None, True)] if request.stream else replies

    def _checked(self, result: Any, requests: Sequence[WireRequest]) -> list[Outputs | ModelCallError | None]:
        try:
            return list(answers_of(self._rules.check(result, requests), requests))
        except OutputError as error:
            raise ModelCallError("INTERNAL", str(error)) from None

    def _called(self, batch: Any) -> Any:
        if self._call is None:
            raise RuntimeError(
                f"model {self.spec.name!r} is not loaded: use it in a with block, or load() it"
            )
        given = batch if accepts_batch(self._call) else batch.as_list()
        return self._context.run(self._call, given)

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


def _request(
    inputs: Mapping[str, Any],
    *,
    version: str | int = "",
    requested_outputs: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    request_id: str = "",
    sequence_id: int | str = 0,
    sequence_start: bool = False,
    sequence_end: bool = False,
) -> LocalRequest:
    del version  # there is one
    sequence = (sequence_id, sequence_start, sequence_end) if sequence_id else None
    return LocalRequest(inputs, parameters or {}, requested_outputs, request_id, timeout_s or 0.0, sequence)


def _reply(answer: Outputs | ModelCallError | None, *, final: bool) -> CallReply:
    if isinstance(answer, ModelCallError):
        return CallReply(None, {}, answer, True)
    return CallReply(dict(answer or {}), {} if answer is None else answer.parameters, None, final)


async def _all(result: Any) -> list[Any]:
    """All that a call gives, whichever kind of callable it is."""
    if isinstance(result, AsyncIterator):
        return [one async for one in result]
    if isinstance(result, Iterator):
        return list(result)
    return [await result if asyncio.iscoroutine(result) else result]
