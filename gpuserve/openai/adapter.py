"""The adapter from a user's callable for OpenAI's clients to an inference callable.

Each inference request has the body of one HTTP request and the name of its endpoint. Each response is a
document, or a chunk of a stream.

============================================  =====================================================
the callable has                              it answers
============================================  =====================================================
a method ``chat``, ``complete`` or ``embed``  that endpoint
none of these methods                         the endpoint of the annotation of its parameter:
                                              ChatRequest, CompletionRequest, EmbeddingRequest,
                                              or several of them joined by ``|``
============================================  =====================================================

Embeddings may be made for many requests at once: a parameter ``list[EmbeddingRequest]`` receives a batch, and
``list[str]`` the texts of a batch.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from gpuserve.model.openai_declaration import METHODS, REQUEST, annotation_names
from gpuserve.openai import documents as written
from gpuserve.openai.answers import BadRequest, NoSuchEndpoint, Token, without_frames
from gpuserve.openai.endpoints import (
    REQUESTS,
    OpenAIEndpoint,
    endpoint_of,
    honoured_members,
    parse_body,
    response_of,
)
from gpuserve.openai.request_types import ChatRequest, CompletionRequest, EmbeddingRequest
from gpuserve.openai.text_answer import TextAnswer
from gpuserve_worker.inference.stepping import is_stepped

if TYPE_CHECKING:
    from gpuserve_worker.inference.inference_request import Request

#: An answer to a request of a batch: a response, an error, or nothing yet.
Answer = Mapping[str, Any] | Exception | None


def adapt_callable(made: Any) -> Any:
    """Return the inference callable over a user's callable. Raise TypeError if that answers no endpoint."""
    model: Any
    if is_stepped(made):
        from gpuserve.openai.stepped import SteppedOpenAI

        model = SteppedOpenAI(made)
    else:
        handlers = handlers_of(made)
        model = OpenAIModel(handlers, made)
        if handlers.keys() == {OpenAIEndpoint.EMBEDDINGS}:
            embed = handlers[OpenAIEndpoint.EMBEDDINGS].call
            function = embed if inspect.isroutine(embed) else type(embed).__call__
            if not inspect.iscoroutinefunction(inspect.unwrap(function)):
                model = EmbeddingModel(handlers, made)
    for hook in ("close", "sleep", "wake"):
        if callable(method := getattr(made, hook, None)):
            setattr(model, hook, method)
    return model


class BatchMember:
    """One request of a batch, for an ``endpoint``. An invalid request has its ``answer`` at once."""

    def __init__(self, request: Request, handlers: Mapping[OpenAIEndpoint, EndpointHandler]) -> None:
        self.answer: Answer = None
        self.shape = request[REQUEST].shape
        try:
            self.endpoint = endpoint_of(request.parameters, handlers)
            handler = handlers[self.endpoint]
            self.request: Any = parse_body(request, self.endpoint, handler.honours)
            if handler.argument is HandlerArgument.TEXTS:
                self.request.require_texts()
        except (BadRequest, NoSuchEndpoint) as error:
            self.answer = without_frames(error)


class EmbeddingModel:
    """A model that only has a blocking function for embeddings. A batch is one call. ``made`` answers
    requests with tensors of its own.
    """

    def __init__(self, handlers: Mapping[OpenAIEndpoint, EndpointHandler], made: Any) -> None:
        self._handlers = handlers
        self._made = made

    def __call__(self, requests: Sequence[Request]) -> list[Answer]:
        if _has_own_tensors(requests):
            own: list[Answer] = self._made(requests)
            return own
        batch = [BatchMember(one, self._handlers) for one in requests]
        groups = _embedding_groups(self._handlers[OpenAIEndpoint.EMBEDDINGS], batch)
        for group in groups:
            with group.catching(alone=len(groups) == 1):
                group.set_answers(group.call())
        return [one.answer for one in batch]


class OpenAIModel:
    """A model of any endpoints, with a stream for each request. ``made`` answers requests that have tensors
    of the model itself.
    """

    def __init__(self, handlers: Mapping[OpenAIEndpoint, EndpointHandler], made: Any) -> None:
        self._handlers = handlers
        self._made = made

    async def __call__(self, requests: Sequence[Request]) -> AsyncGenerator[list[Answer]]:
        if _has_own_tensors(requests):
            result = self._made(requests)
            if isinstance(result, AsyncGenerator):
                async with aclosing(result) as each:
                    async for own in each:
                        yield own
            else:
                yield await result if inspect.isawaitable(result) else result
            return
        batch = [BatchMember(one, self._handlers) for one in requests]
        alone = len(batch) == 1
        refused: list[Answer] = [one.answer for one in batch]
        if any(refused):
            yield refused
        if groups := _embedding_groups(self._handlers.get(OpenAIEndpoint.EMBEDDINGS), batch):
            yield await _answer_embeddings(groups, batch)
        positions = [at for at, one in enumerate(batch) if one.answer is None]
        if not positions:
            return
        streams = [self._documents(batch[at], alone=alone) for at in positions]
        async with aclosing(merge_streams(streams)) as documents:
            async for number, document in documents:
                answers: list[Answer] = [None] * len(batch)
                answers[positions[number]] = document
                yield answers

    async def _documents(self, one: BatchMember, *, alone: bool) -> AsyncGenerator[Answer]:
        """Yield the responses to one request. If it is ``alone``, raise its error, so that it is logged."""
        call = self._handlers[one.endpoint].call
        try:
            async with aclosing(_text_documents(call, one.request)) as documents:
                async for document in documents:
                    yield response_of(document, one.shape)
        except BadRequest as error:
            yield without_frames(error)
        except Exception as error:  # user code may raise anything; other requests continue
            if alone:
                raise
            traceback.print_exception(error)
            yield without_frames(error)


def _has_own_tensors(requests: Sequence[Request]) -> bool:
    """Return whether a batch has inputs of the model file itself. Raise ``BadRequest`` without inputs."""
    if not len(requests[0]):
        raise BadRequest(f"expected the input '{REQUEST}', or the inputs of the model")
    return REQUEST not in requests[0]


class EmbeddingGroup:
    """The requests that one call embeds."""

    def __init__(self, handler: EndpointHandler, members: Sequence[BatchMember]) -> None:
        self._handler = handler
        self._members = members

    def call(self) -> Any:
        requests: list[EmbeddingRequest] = [one.request for one in self._members]
        if self._handler.argument is HandlerArgument.REQUEST:
            return self._handler.call(requests[0])
        if self._handler.argument is HandlerArgument.REQUESTS:
            return self._handler.call(requests)
        return self._handler.call([text for one in requests for text in one.texts])

    def set_answers(self, given: Any) -> None:
        """Set each request's answer from the result. Raise ValueError for a wrong number of parts."""
        if self._handler.argument is HandlerArgument.REQUEST:
            given = [given]
        elif self._handler.argument is HandlerArgument.TEXTS:
            given = written.split_embeddings(given, [one.request for one in self._members])
        if len(given) != len(self._members):
            raise ValueError(f"expected embeddings of {len(self._members)} requests, got {len(given)}")
        for one, vectors in zip(self._members, given, strict=True):
            if isinstance(vectors, Exception):
                one.answer = vectors
                continue
            try:
                one.answer = response_of(written.embedding_document(one.request, vectors), one.shape)
            except BadRequest as error:
                one.answer = without_frames(error)

    @contextmanager
    def catching(self, *, alone: bool) -> Iterator[None]:
        """Answer these requests with an exception of the block. If these requests are the whole batch
        (``alone``), the exception is raised, so that it is logged.
        """
        try:
            yield
        except Exception as error:  # user code may raise anything; other requests continue
            if not isinstance(error, BadRequest):
                if alone:
                    raise
                traceback.print_exception(error)
            for one in self._members:
                one.answer = without_frames(error)


def _embedding_groups(handler: EndpointHandler | None, batch: Sequence[BatchMember]) -> list[EmbeddingGroup]:
    found = [one for one in batch if one.answer is None and one.endpoint is OpenAIEndpoint.EMBEDDINGS]
    if handler is None or not found:
        return []
    groups = [[one] for one in found] if handler.argument is HandlerArgument.REQUEST else [found]
    return [EmbeddingGroup(handler, members) for members in groups]


async def _answer_embeddings(groups: Sequence[EmbeddingGroup], batch: Sequence[BatchMember]) -> list[Answer]:
    members = [one for one in batch if one.answer is None]
    for group in groups:
        with group.catching(alone=len(groups) == 1 and len(members) == len(batch)):
            given = group.call()
            group.set_answers(await given if inspect.isawaitable(given) else given)
    return [one.answer if one in members else None for one in batch]


async def _text_documents(
    call: Callable[[Any], Any], request: ChatRequest | CompletionRequest
) -> AsyncGenerator[bytes]:
    answer = TextAnswer(request)
    streams = [_batches(call(one), answer, index) for index, one in enumerate(answer.wanted)]
    async with aclosing(merge_streams(streams)) as each:
        async for _, documents in each:
            for document in documents:
                yield document
    for document in answer.end():
        yield document


async def _batches(result: Any, answer: TextAnswer, index: int) -> AsyncGenerator[list[bytes]]:
    """Yield the documents of one answer as its values come."""
    async with aclosing(each_value(result)) as given:
        async for one in given:
            if documents := answer.add(index, [one]):
                yield documents
            if answer.is_over(index):
                return
    yield answer.add(index, (), is_last=True)


class HandlerArgument(enum.Enum):
    """The argument of a handler function."""

    REQUEST = "one request"
    REQUESTS = "the requests of a batch"
    TEXTS = "the texts of a batch"


class EndpointHandler(NamedTuple):
    """A function that answers an endpoint, and the decisive members that it honours."""

    call: Callable[[Any], Any]
    argument: HandlerArgument = HandlerArgument.REQUEST
    honours: frozenset[str] = frozenset()


def handlers_of(made: Any) -> dict[OpenAIEndpoint, EndpointHandler]:
    """Return the handlers of a callable by endpoint. Raise TypeError if there are none."""
    honours = honoured_members(made)
    found = {
        endpoint: EndpointHandler(method, _argument_of(endpoint, method), honours)
        for endpoint, name in zip(OpenAIEndpoint, METHODS, strict=True)
        if callable(method := getattr(made, name, None))
    }
    if not found and callable(made):
        words = annotation_names(made)
        named = [endpoint for endpoint, kind in REQUESTS.items() if kind.__name__ in words]
        found = {endpoint: EndpointHandler(made, _argument_of(endpoint, made), honours) for endpoint in named}
    if not found:
        raise TypeError(
            "a callable for openai: true needs a method chat, complete or embed, or a parameter annotated "
            "with ChatRequest, CompletionRequest or EmbeddingRequest of gpuserve.openai"
        )
    return found


def _argument_of(endpoint: OpenAIEndpoint, function: Callable[..., Any]) -> HandlerArgument:
    words = annotation_names(function)
    if endpoint is not OpenAIEndpoint.EMBEDDINGS or not words & {"list", "List", "Sequence"}:
        return HandlerArgument.REQUEST
    return HandlerArgument.TEXTS if "str" in words else HandlerArgument.REQUESTS


_One = TypeVar("_One")
#: Interval at which an iterator that never awaits yields to the event loop.
_SLICE_S: Final = 0.0005
_END: Final = object()


class _Raised(NamedTuple):
    error: Exception


async def each_value(result: Any) -> AsyncGenerator[Any]:
    """Yield the values of a result: a text, a list, an iterator or an awaitable. Close it at the end."""
    if inspect.isawaitable(result):
        result = await result
    try:
        if isinstance(result, AsyncIterator):
            async for one in result:
                yield one
        elif isinstance(result, Iterator | list | tuple):
            ends = perf_counter() + _SLICE_S
            for one in result:
                yield one
                if perf_counter() >= ends:
                    await asyncio.sleep(0)
                    ends = perf_counter() + _SLICE_S
        else:  # the number of tokens of a whole text is unknown
            yield Token(result, 0) if isinstance(result, str) else result
    finally:
        if isinstance(result, AsyncIterator) and hasattr(result, "aclose"):
            await result.aclose()
        elif isinstance(result, Iterator) and hasattr(result, "close"):
            result.close()


async def merge_streams(streams: Sequence[AsyncGenerator[_One]]) -> AsyncGenerator[tuple[int, _One]]:
    """Yield the values of several streams as they come, each with the position of its stream. All streams are
    closed with this one. An error of a stream is raised.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for one in only:
                yield 0, one
        return
    values: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_queue_values(number, one, values)) for number, one in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, one = await values.get()
            if isinstance(one, _Raised):
                raise one.error
            if one is _END:
                left -= 1
            else:
                yield number, one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _queue_values(
    number: int, stream: AsyncGenerator[Any], values: asyncio.Queue[tuple[int, Any]]
) -> None:
    async with aclosing(stream):
        try:
            async for one in stream:
                await values.put((number, one))
            await values.put((number, _END))
        except Exception as error:  # user code may raise anything; the reader of the streams raises it
            await values.put((number, _Raised(error)))
