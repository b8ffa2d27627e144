"""Inference callables for a ``TritonPythonModel``: plain, with a coroutine ``execute``, and decoupled."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from gpuserve.backends.batch_tensors import BatchTensors
from gpuserve.backends.python_backend.errors import TritonModelException
from gpuserve.backends.python_backend.inference_requests import ReceivedRequest
from gpuserve.backends.python_backend.responses import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    BatchResponseQueue,
    InferenceResponse,
    to_worker_answer,
)
from gpuserve_worker.inference.inference_request import Request

#: Unfinished batches of a decoupled model, with and without dynamic batching.
_MERGED_CONCURRENCY: Final = 16
_SINGLE_CONCURRENCY: Final = 128


class ExecutedModel:
    """Base class of the three kinds of models. A worker calls ``close`` after the last batch."""

    #: Set if the configuration has a ``batch_input``.
    batch_tensors: BatchTensors | None = None

    def __init__(self, model: Any, outputs: Collection[str], instance: str) -> None:
        #: What a worker writes before the text of an exception of ``execute``, as Triton does.
        self.failure_prefix = f"Failed to process the request(s) for model '{instance}', message: "
        self._instance = instance
        self._model = model
        self._outputs = outputs
        self._execute: Callable[[list[ReceivedRequest]], Any] = model.execute

    def _receive(self, requests: Any, responses: BatchResponseQueue) -> list[ReceivedRequest]:
        if self.batch_tensors is not None:
            requests = self.batch_tensors.add_inputs(requests)
        received = [ReceivedRequest(one, at, responses) for at, one in enumerate(requests)]
        if responses.decoupled:
            for one in received:  # a request ends when its sender is deleted, so each needs a sender
                one.get_response_sender()
        return received

    def rescheduled_of(self, returned: Any, received: list[ReceivedRequest]) -> list[ReceivedRequest]:
        """Return the rescheduled requests. Raise TritonModelException if ``execute`` returned something."""
        if returned is not None:
            raise TritonModelException(
                f"Python model '{self._instance}' is using the decoupled mode and the execute function must "
                "return None."
            )
        return _rescheduled(received)

    def close(self) -> None:
        finalize = getattr(self._model, "finalize", None)
        if finalize is not None:
            finalize()


class ReturningModel(ExecutedModel):
    """A model whose ``execute`` returns a response for each request, or sends the response."""

    def __call__(self, requests: Sequence[Request]) -> list[Any]:
        sent = threading.Lock()  # released once for each time that no answer was found; costs less than Event
        sent.acquire()
        responses = BatchResponseQueue(len(requests), self._outputs, sent.release, decoupled=False)
        received = self._receive(requests, responses)
        try:
            returned = self._execute(received)
            if not responses.is_used and (answers := _answers(returned, received, self._outputs)) is not None:
                return answers
            while received := send_returned(returned, received):
                returned = self._execute(received)
            del returned
        except Exception as error:  # user code may raise anything
            _fail_unfinished(received, responses, error)
            received = []
        while (answers := responses.all_answers()) is None:
            sent.acquire()
        return answers


class AwaitingModel(ExecutedModel):
    """A model like ``ReturningModel`` whose ``execute`` is a coroutine function."""

    #: Batches do not overlap, as with Triton.
    concurrency: Final = 1

    def __init__(self, model: Any, outputs: Collection[str], instance: str) -> None:
        super().__init__(model, outputs, instance)
        self._tasks: set[asyncio.Future[Any]] = set()

    async def __call__(self, requests: Sequence[Request]) -> list[Any]:
        sent = asyncio.Event()
        responses = BatchResponseQueue(len(requests), self._outputs, event_setter(sent), decoupled=False)
        received = self._receive(requests, responses)
        try:
            returned = await self._run_shielded(received)
            if not responses.is_used and (answers := _answers(returned, received, self._outputs)) is not None:
                return answers
            while received := send_returned(returned, received):
                returned = await self._run_shielded(received)
            del returned
        except Exception as error:  # user code may raise anything
            _fail_unfinished(received, responses, error)
            received = []
        while (answers := responses.all_answers()) is None:
            await sent.wait()
            sent.clear()
        return answers

    def _run_shielded(self, received: list[ReceivedRequest]) -> Awaitable[Any]:
        """Run the coroutine. Cancelled requests do not cancel ``execute``, which polls ``is_cancelled``."""
        task = asyncio.ensure_future(self._execute(received))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asyncio.shield(task)


class SendingModel(ExecutedModel):
    """A decoupled model: ``execute`` returns None, and responses are sent when they are ready."""

    def __init__(self, model: Any, outputs: Collection[str], instance: str, *, merges: bool) -> None:
        super().__init__(model, outputs, instance)
        #: Many batches may be unfinished, because the model processes them in its own threads or an engine.
        #: With dynamic batching fewer are allowed, so that waiting requests form larger batches.
        self.concurrency = _MERGED_CONCURRENCY if merges else _SINGLE_CONCURRENCY
        self._thread = ExecuteThread()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start = (
            self._start_task if inspect.iscoroutinefunction(model.execute) else self._start_in_thread
        )

    async def __call__(self, requests: Sequence[Request]) -> AsyncIterator[list[Any]]:
        sent = asyncio.Event()
        responses = BatchResponseQueue(len(requests), self._outputs, event_setter(sent), decoupled=True)
        self._start(self._receive(requests, responses), responses)
        del requests
        try:
            while (step := responses.next_step()) != []:
                if step is not None:
                    yield step
                else:
                    await sent.wait()
                    sent.clear()
        finally:
            responses.close()

    def close(self) -> None:
        self._thread.close()
        super().close()

    def _start_in_thread(self, received: list[ReceivedRequest], responses: BatchResponseQueue) -> None:
        self._thread.run(partial(self._execute_and_fail, received, responses))

    def _execute_and_fail(self, received: list[ReceivedRequest], responses: BatchResponseQueue) -> None:
        try:
            returned = self._execute(received)
            if again := self.rescheduled_of(returned, received):
                self._start_in_thread(again, responses)
        except BaseException as error:
            _fail_batch(responses, error)

    def _start_task(self, received: list[ReceivedRequest], responses: BatchResponseQueue) -> None:
        task = asyncio.get_running_loop().create_task(self._await_and_fail(received, responses))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await_and_fail(self, received: list[ReceivedRequest], responses: BatchResponseQueue) -> None:
        try:
            returned = await self._execute(received)
            if again := self.rescheduled_of(returned, received):
                self._start_task(again, responses)
        except BaseException as error:
            _fail_batch(responses, error)
            raise


class ExecuteThread:
    """The thread that calls a decoupled model's ``execute``, one call after the other.

    The worker's own thread sends the responses meanwhile. The thread starts with the first call, in the
    context variables of the thread that makes it, and is a daemon, because a call may never return.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], None]) -> None:
        if self._thread is None:
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=lambda: context.run(self._run_calls), name="gpuserve-execute", daemon=True
            )
            self._thread.start()
        self._calls.put(call)

    def close(self) -> None:
        """Wait until all calls have returned."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # frees the requests before the next call comes


def _answers(
    returned: Any, received: Sequence[ReceivedRequest], declared: Collection[str]
) -> list[Any] | None:
    """Convert what ``execute`` returned. Return None unless that is a response for each request."""
    if type(returned) is not list or len(returned) != len(received):
        return None
    if set(map(type, returned)) != {InferenceResponse}:
        return None
    return [to_worker_answer(one, declared) for one in returned]


def send_returned(returned: Any, received: list[ReceivedRequest]) -> list[ReceivedRequest]:
    """Send the returned responses of a model that also sends some itself. Return the rescheduled requests.
    Raise TritonModelException if ``execute`` returned something else.
    """
    for request, response in zip(received, _checked_responses(returned, len(received)), strict=True):
        if response is None:
            request.get_response_sender()  # from now on the request ends when its sender is deleted
        elif request.is_rescheduled:
            raise TritonModelException(
                "execute must return None for a request that it rescheduled, but returned a response"
            )
        else:
            request.get_response_sender().send(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    return _rescheduled(received)


def _checked_responses(returned: Any, count: int) -> list[Any]:
    if returned is None:
        return [None] * count
    if not isinstance(returned, list):
        raise TritonModelException(f"Expected a list in the execute return, found type '{type(returned)}'.")
    if len(returned) != count:
        raise TritonModelException(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"InferenceRequest(s) size is:{count}, and InferenceResponse(s) size is:{len(returned)}"
        )
    for one in returned:
        if one is not None and not isinstance(one, InferenceResponse):
            raise TritonModelException(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(one)}'."
            )
    return returned


def _rescheduled(received: list[ReceivedRequest]) -> list[ReceivedRequest]:
    again = [one for one in received if one.is_rescheduled]
    for one in again:
        one.reset_release_flags()
    return again


def _fail_unfinished(
    received: list[ReceivedRequest], responses: BatchResponseQueue, error: Exception
) -> None:
    """Fail the requests that have not ended. Raise the error itself if that is the whole batch."""
    if not responses.is_used:
        raise error
    traceback.print_exception(error, file=sys.stderr)
    for one in received:
        one.get_response_sender().fail(error)


def _fail_batch(responses: BatchResponseQueue, error: BaseException) -> None:
    """End a batch with the exception of ``execute``. An exception after the last response is only logged."""
    if not responses.fail(error):
        traceback.print_exception(error, file=sys.stderr)


def event_setter(event: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets an event of the running loop from any thread."""
    loop = asyncio.get_running_loop()

    def set_event() -> None:
        with suppress(RuntimeError):  # the worker's loop is closed
            loop.call_soon_threadsafe(event.set)

    return set_event
