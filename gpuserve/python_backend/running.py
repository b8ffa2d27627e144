"""How the batches of a ``TritonPythonModel`` are run: of one that returns its responses, one that awaits
them, one that sends any number. Each is an inference callable for a worker's loop. Here is when ``execute``
is called and what becomes of what it gives; what requests and responses are is not.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from gpuserve.python_backend.errors import TritonModelException
from gpuserve.python_backend.execute_thread import ExecuteThread
from gpuserve.python_backend.requests import ReceivedRequest
from gpuserve.python_backend.response_queue import ResponseQueue
from gpuserve.python_backend.responses import InferenceResponse, answer_of
from gpuserve.python_backend.senders import TRITONSERVER_RESPONSE_COMPLETE_FINAL
from gpuserve_worker.calling.request import Request

_MERGED: Final = 16
_ALONE: Final = 128


class ModelLife:
    """A model that hears of its end: a worker calls ``close`` after the last batch."""

    def __init__(self, model: Any, outputs: Collection[str]) -> None:
        self._model = model
        self._outputs = outputs
        self._execute: Callable[[list[ReceivedRequest]], Any] = model.execute

    def close(self) -> None:
        finalize = getattr(self._model, "finalize", None)
        if finalize is not None:
            finalize()


class ReturningModel(ModelLife):
    """A model whose ``execute`` returns a response for each request, or sends it."""

    def __call__(self, requests: Sequence[Request]) -> list[Any]:
        sent = threading.Event()
        responses = ResponseQueue(len(requests), self._outputs, sent.set, decoupled=False)
        received = _received(requests, responses)
        try:
            returned = self._execute(received)
            if not responses.is_used and (answers := _answers(returned, received, self._outputs)) is not None:
                return answers
            while received := _pass_on(returned, received):
                returned = self._execute(received)
            del returned
        except Exception as error:  # user code may raise anything
            _fail_rest(received, responses, error)
            received = []
        while (answers := responses.take_all()) is None:
            sent.wait()
            sent.clear()
        return answers


class AwaitingModel(ModelLife):
    """A model whose ``execute`` is a coroutine, which returns as that of a ``ReturningModel`` does."""

    #: The next one begins when it has returned, as with Triton.
    concurrency: Final = 1

    def __init__(self, model: Any, outputs: Collection[str]) -> None:
        super().__init__(model, outputs)
        self._tasks: set[asyncio.Future[Any]] = set()

    async def __call__(self, requests: Sequence[Request]) -> list[Any]:
        sent = asyncio.Event()
        responses = ResponseQueue(len(requests), self._outputs, _waking(sent), decoupled=False)
        received = _received(requests, responses)
        try:
            returned = await self._executed(received)
            if not responses.is_used and (answers := _answers(returned, received, self._outputs)) is not None:
                return answers
            while received := _pass_on(returned, received):
                returned = await self._executed(received)
            del returned
        except Exception as error:  # user code may raise anything
            _fail_rest(received, responses, error)
            received = []
        while (answers := responses.take_all()) is None:
            await sent.wait()
            sent.clear()
        return answers

    def _executed(self, received: list[ReceivedRequest]) -> Awaitable[Any]:
        """What the coroutine returns. It is not cancelled with its request: it asks for that itself."""
        task = asyncio.ensure_future(self._execute(received))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asyncio.shield(task)


class SendingModel(ModelLife):
    """A decoupled model: its ``execute`` returns nothing, and responses are sent whenever they are ready."""

    def __init__(self, model: Any, outputs: Collection[str], *, merges: bool) -> None:
        super().__init__(model, outputs)
        #: Batches that are not over may be many: the model has them in threads of its own, or in an engine.
        #: Where requests are merged, those that wait make larger batches.
        self.concurrency = _MERGED if merges else _ALONE
        self._thread = ExecuteThread()
        self._tasks: set[asyncio.Task[None]] = set()
        self._begin = self._begin_task if inspect.iscoroutinefunction(model.execute) else self._begin_call

    async def __call__(self, requests: Sequence[Request]) -> AsyncIterator[list[Any]]:
        sent = asyncio.Event()
        responses = ResponseQueue(len(requests), self._outputs, _waking(sent), decoupled=True)
        self._begin(_received(requests, responses), responses)
        del requests
        try:
            while (step := responses.take()) != []:
                if step is not None:
                    yield step
                else:
                    await sent.wait()
                    sent.clear()
        finally:
            responses.drop()

    def close(self) -> None:
        self._thread.close()
        super().close()

    def _begin_call(self, received: list[ReceivedRequest], responses: ResponseQueue) -> None:
        self._thread.run(partial(self._call, received, responses))

    def _call(self, received: list[ReceivedRequest], responses: ResponseQueue) -> None:
        try:
            returned = self._execute(received)
            if again := _rescheduled(returned, received):
                self._begin_call(again, responses)
        except BaseException as error:
            _fail(responses, error)

    def _begin_task(self, received: list[ReceivedRequest], responses: ResponseQueue) -> None:
        task = asyncio.get_running_loop().create_task(self._await(received, responses))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, received: list[ReceivedRequest], responses: ResponseQueue) -> None:
        try:
            returned = await self._execute(received)
            if again := _rescheduled(returned, received):
                self._begin_task(again, responses)
        except BaseException as error:
            _fail(responses, error)
            raise


def _received(requests: Sequence[Request], responses: ResponseQueue) -> list[ReceivedRequest]:
    received = [ReceivedRequest(one, position, responses) for position, one in enumerate(requests)]
    if responses.decoupled:
        for one in received:  # so that one that nobody keeps ends
            one.get_response_sender()
    return received


def _answers(
    returned: Any, received: Sequence[ReceivedRequest], declared: Collection[str]
) -> list[Any] | None:
    """The answers in what ``execute`` returned; None where it is not a response for each request."""
    if type(returned) is not list or len(returned) != len(received):
        return None
    if set(map(type, returned)) != {InferenceResponse}:
        return None
    return [answer_of(one, declared) for one in returned]


def _pass_on(returned: Any, received: list[ReceivedRequest]) -> list[ReceivedRequest]:
    """Send what ``execute`` returned, where some responses are sent by the model; those to be executed again.
    ``TritonModelException``: it returned what is none.
    """
    for request, response in zip(received, _checked(returned, len(received)), strict=True):
        if response is None:
            request.get_response_sender()  # from now on the request ends with the last that refers to it
        elif request.is_rescheduled:
            raise TritonModelException(
                "execute must return None for a request that it rescheduled, but returned a response"
            )
        else:
            request.get_response_sender().send(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    return _to_come_again(received)


def _checked(returned: Any, count: int) -> list[Any]:
    if returned is None:
        return [None] * count
    if not isinstance(returned, list):
        raise TritonModelException(
            "execute must return a list of pb_utils.InferenceResponse, one for each request, but returned "
            f"{type(returned).__name__}"
        )
    if len(returned) != count:
        raise TritonModelException(
            f"execute returned {len(returned)} {'response' if len(returned) == 1 else 'responses'} for "
            f"{count} {'request' if count == 1 else 'requests'}"
        )
    for one in returned:
        if one is not None and not isinstance(one, InferenceResponse):
            raise TritonModelException(
                "execute must return a list of pb_utils.InferenceResponse, but one element is "
                f"{type(one).__name__}"
            )
    return returned


def _rescheduled(returned: Any, received: list[ReceivedRequest]) -> list[ReceivedRequest]:
    """The requests that a decoupled model wants once more; ``TritonModelException``: it returned more."""
    if returned is not None:
        raise TritonModelException(
            "execute of a decoupled model must return None and send its responses, but returned "
            f"{type(returned).__name__}"
        )
    return _to_come_again(received)


def _to_come_again(received: list[ReceivedRequest]) -> list[ReceivedRequest]:
    again = [one for one in received if one.is_rescheduled]
    for one in again:
        one.come_again()
    return again


def _fail_rest(received: list[ReceivedRequest], responses: ResponseQueue, error: Exception) -> None:
    """Let the requests that have not ended fail; raises the error itself where that is all of them."""
    if not responses.is_used:
        raise error
    traceback.print_exception(error, file=sys.stderr)
    for one in received:
        one.get_response_sender().fail(error)


def _fail(responses: ResponseQueue, error: BaseException) -> None:
    """End a batch with what ``execute`` raised; what came after its end is only for the log."""
    if not responses.fail(error):
        traceback.print_exception(error, file=sys.stderr)


def _waking(event: asyncio.Event) -> Callable[[], None]:
    """What sets an event of the running loop from any thread."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # the worker has ended
            loop.call_soon_threadsafe(event.set)

    return wake
