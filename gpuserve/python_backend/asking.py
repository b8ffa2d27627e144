"""Requests of a ``model.py`` to other models of its server: how they are asked, and the responses that come.
What a request says is in ``requests.py``; how it travels is the worker's business.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Final

from gpuserve.python_backend.errors import error_of
from gpuserve.python_backend.model_file import context
from gpuserve.python_backend.responses import InferenceResponse
from gpuserve.python_backend.tensors import received_tensor, value_of
from gpuserve_worker.calling.calls import CallReply, ModelCall, OutgoingCalls
from gpuserve_worker.calling.questions import CallRequest, ModelCallError, call_request

if TYPE_CHECKING:
    from gpuserve.python_backend.requests import InferenceRequest

_START: Final = 1
_END: Final = 2
_US: Final = 1e-6


def ask(request: InferenceRequest) -> InferenceResponse:
    """The one response to a request; the thread waits for it."""
    try:
        calls, call = _asked(request, stream=False, blocks=True)
    except ModelCallError as error:
        return _failed(error)
    try:
        return _response(call.take())
    finally:
        calls.forget(call)


async def ask_async(request: InferenceRequest) -> InferenceResponse:
    """As ``ask``, while the event loop goes on."""
    try:
        calls, call = _asked(request, stream=False, blocks=False)
    except ModelCallError as error:
        return _failed(error)
    try:
        return _response(await call.take_async())
    finally:
        calls.forget(call)


def ask_stream(request: InferenceRequest, *, blocks: bool) -> ResponseIterator:
    """The responses to a request, as they come."""
    try:
        return ResponseIterator(*_asked(request, stream=True, blocks=blocks))
    except ModelCallError as error:
        return ResponseIterator(None, None, _failed(error))


class ResponseIterator(Iterator[InferenceResponse], AsyncIterator[InferenceResponse]):
    """The responses of another model, for ``for`` or ``async for``. One that nobody has any more is called
    off.
    """

    def __init__(
        self,
        calls: OutgoingCalls | None,
        call: ModelCall | None,
        refusal: InferenceResponse | None = None,
    ) -> None:
        self._calls = calls
        self._call = call
        self._refusal = refusal

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        if (refusal := self._refused()) is not None:
            return refusal
        found = None if self._call is None else self._next(self._call.take())
        if found is None:
            raise StopIteration
        return found

    def __aiter__(self) -> ResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        if (refusal := self._refused()) is not None:
            return refusal
        found = None if self._call is None else self._next(await self._call.take_async())
        if found is None:
            raise StopAsyncIteration
        return found

    def cancel(self) -> None:
        """Say that no more responses are wanted."""
        calls, call, self._call = self._calls, self._call, None
        if calls is not None and call is not None:
            calls.forget(call)

    def _refused(self) -> InferenceResponse | None:
        refusal, self._refusal = self._refusal, None
        return refusal

    def _next(self, reply: CallReply) -> InferenceResponse | None:
        if reply.final:
            self.cancel()
        return None if reply.outputs is None and reply.error is None else _response(reply)

    def __del__(self) -> None:
        self.cancel()


def _asked(request: InferenceRequest, *, stream: bool, blocks: bool) -> tuple[OutgoingCalls, ModelCall]:
    asked = _question(request, stream=stream, blocks=blocks)
    calls = context().calls
    return calls, calls.ask(asked)


def _question(request: InferenceRequest, *, stream: bool, blocks: bool) -> CallRequest:
    version, flags, timeout_us = request.model_version(), request.flags(), request.timeout()
    return call_request(
        request.model_name(),
        {one.name(): value_of(one) for one in request.inputs()},
        stream=stream,
        blocks=blocks,
        version="" if version < 0 else version,
        requested_outputs=sorted(request.requested_output_names()),
        parameters=request.given_parameters(),
        timeout_s=timeout_us * _US if timeout_us else None,
        request_id=request.request_id(),
        sequence_id=request.correlation_id(),
        sequence_start=bool(flags & _START),
        sequence_end=bool(flags & _END),
    )


def _response(reply: CallReply) -> InferenceResponse:
    if reply.error is not None:
        return _failed(reply.error)
    outputs = [received_tensor(name, array) for name, array in (reply.outputs or {}).items()]
    return InferenceResponse(outputs, parameters=reply.parameters)


def _failed(error: ModelCallError) -> InferenceResponse:
    return InferenceResponse(error=error_of(error))
