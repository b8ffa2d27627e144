"""A user's callable as an inference callable: each request brings the body of one HTTP request and which
endpoint it came to, each response is a document, or a chunk of a stream. The only file of this package that
knows tensors.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve.openai import embeddings
from gpuserve.openai.answers import BadRequest, NoSuchEndpoint, without_frames
from gpuserve.openai.choice import Choice, Delta
from gpuserve.openai.documents import ChatDocuments, CompletionDocuments, Documents, usage_document
from gpuserve.openai.given import each_given, merged
from gpuserve.openai.handlers import REQUESTS, Endpoint, Handler, Takes, handlers_of
from gpuserve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    OpenAIRequest,
    each_answer,
    parse,
)
from gpuserve.openai.stops import Stops

if TYPE_CHECKING:
    from gpuserve_worker.calling.request import Request

#: As ``gpuserve/model/openai_declaration.py`` declares them.
_REQUEST: Final = "request"
_RESPONSE: Final = "response"
_ENDPOINT: Final = "endpoint"
#: Of an answer that is gathered before it is sent, where a piece counts at least as 64.
MAX_ANSWER_CHARACTERS: Final = 64 << 20
#: An answer to a request of a batch: a response, an error, or nothing yet.
Answer = Mapping[str, Any] | Exception | None


def adapted(made: Any) -> Callable[[Any], Any]:
    """The inference callable over what a user wrote. Raises TypeError: it answers no endpoint."""
    handlers = handlers_of(made)
    embed = handlers.get(Endpoint.EMBEDDINGS)
    if embed is not None and len(handlers) == 1 and not inspect.iscoroutinefunction(_function(embed.call)):
        return EmbeddingModel(embed)
    return OpenAIModel(handlers)


def _function(call: Any) -> Any:
    return inspect.unwrap(call if inspect.isroutine(call) else type(call).__call__)


class Asked:
    """One request of a batch: what is asked of which ``endpoint``. The ``answer`` is there at once where it
    cannot be read.
    """

    def __init__(self, request: Request, handlers: Mapping[Endpoint, Handler]) -> None:
        self.answer: Answer = None
        self._shape = request[_REQUEST].shape
        try:
            self.endpoint = _endpoint(request.parameters, handlers)
            self.request: Any = _parsed(request, self.endpoint, handlers[self.endpoint].takes)
        except (BadRequest, NoSuchEndpoint) as error:
            self.answer = without_frames(error)

    def response(self, document: bytes) -> dict[str, Any]:
        tensor = np.empty(self._shape, dtype=object)
        tensor.fill(document)
        return {_RESPONSE: tensor}


def _endpoint(parameters: Mapping[str, Any], handlers: Mapping[Endpoint, Handler]) -> Endpoint:
    named = parameters.get(_ENDPOINT)
    if named is None and len(handlers) == 1:
        return next(iter(handlers))
    for one in handlers:
        if one.value == named:
            return one
    known = " and ".join(f"{one.value}" for one in handlers)
    raise NoSuchEndpoint(f"the model answers {known}, not {str(named)[:64]!r}")


def _parsed(request: Request, endpoint: Endpoint, takes: Takes) -> OpenAIRequest:
    bodies = request[_REQUEST]
    if bodies.size != 1:
        raise BadRequest(f"expected one body in a request, given {bodies.size}")
    forwarded = {key: one for key, one in request.parameters.items() if key != _ENDPOINT}
    asked = parse(REQUESTS[endpoint], bodies.item(), forwarded)
    if isinstance(asked, EmbeddingRequest) and takes is Takes.TEXTS:
        asked.only_texts()
    return asked


class EmbeddingModel:
    """Embeddings alone, by a function that just returns: a batch is one call."""

    def __init__(self, embed: Handler) -> None:
        self._handlers = {Endpoint.EMBEDDINGS: embed}

    def __call__(self, requests: Sequence[Request]) -> list[Answer]:
        batch = [Asked(one, self._handlers) for one in requests]
        groups = _groups(self._handlers[Endpoint.EMBEDDINGS], batch)
        for group in groups:
            with group.answering(alone=len(groups) == 1):
                group.answer(group.call())
        return [one.answer for one in batch]


class OpenAIModel:
    """Any endpoints. Batches are an exception here: a stream of one request does not wait for another's."""

    def __init__(self, handlers: dict[Endpoint, Handler]) -> None:
        self._handlers = handlers

    async def __call__(self, requests: Sequence[Request]) -> AsyncGenerator[list[Answer]]:
        batch = [Asked(one, self._handlers) for one in requests]
        alone = len(batch) == 1
        refused: list[Answer] = [one.answer for one in batch]
        if any(refused):
            yield refused
        if groups := _groups(self._handlers.get(Endpoint.EMBEDDINGS), batch):
            yield await _embedded(groups, batch)
        positions = [at for at, one in enumerate(batch) if one.answer is None]
        if not positions:
            return
        streams = [self._documents(batch[at], alone=alone) for at in positions]
        async with aclosing(merged(streams)) as documents:
            async for number, document in documents:
                answers: list[Answer] = [None] * len(batch)
                answers[positions[number]] = document
                yield answers

    async def _documents(self, one: Asked, *, alone: bool) -> AsyncGenerator[Answer]:
        """The responses to one request. An error of one that is ``alone`` is raised, and so logged."""
        call = self._handlers[one.endpoint].call
        try:
            async with aclosing(_text(call, one.request)) as documents:
                async for document in documents:
                    yield one.response(document)
        except BadRequest as error:
            yield without_frames(error)
        except Exception as error:  # user code may raise anything; the others of the batch go on
            if alone:
                raise
            traceback.print_exception(error)
            yield without_frames(error)


# ---- embeddings -----------------------------------------------------------------------------------


class EmbeddingGroup:
    """The requests that are embedded by one call."""

    def __init__(self, handler: Handler, members: Sequence[Asked]) -> None:
        self._handler = handler
        self._members = members

    def call(self) -> Any:
        asked: list[EmbeddingRequest] = [one.request for one in self._members]
        if self._handler.takes is Takes.REQUEST:
            return self._handler.call(asked[0])
        if self._handler.takes is Takes.REQUESTS:
            return self._handler.call(asked)
        return self._handler.call([text for one in asked for text in one.texts])

    def answer(self, given: Any) -> None:
        """Answer each by what the call gave. Raises ValueError: that is not something for each."""
        if self._handler.takes is Takes.REQUEST:
            given = [given]
        elif self._handler.takes is Takes.TEXTS:
            given = embeddings.cut_apart(given, [one.request for one in self._members])
        if len(given) != len(self._members):
            raise ValueError(f"expected embeddings of {len(self._members)} requests, got {len(given)}")
        for one, vectors in zip(self._members, given, strict=True):
            if isinstance(vectors, Exception):
                one.answer = vectors
                continue
            try:
                one.answer = one.response(embeddings.answer(one.request, vectors))
            except BadRequest as error:
                one.answer = without_frames(error)

    @contextmanager
    def answering(self, *, alone: bool) -> Iterator[None]:
        """What goes wrong meanwhile answers these requests. What does in a batch that is ``alone`` with them
        is raised, for the log to have it.
        """
        try:
            yield
        except Exception as error:  # user code may raise anything; the others of the batch go on
            if alone and not isinstance(error, BadRequest):
                raise
            if not isinstance(error, BadRequest):
                traceback.print_exception(error)
            for one in self._members:
                one.answer = without_frames(error)


def _groups(handler: Handler | None, batch: Sequence[Asked]) -> list[EmbeddingGroup]:
    found = [one for one in batch if one.answer is None and one.endpoint is Endpoint.EMBEDDINGS]
    if handler is None or not found:
        return []
    if handler.takes is Takes.REQUEST:
        return [EmbeddingGroup(handler, [one]) for one in found]
    return [EmbeddingGroup(handler, found)]


async def _embedded(groups: Sequence[EmbeddingGroup], batch: Sequence[Asked]) -> list[Answer]:
    members = [one for one in batch if one.answer is None]
    for group in groups:
        with group.answering(alone=len(groups) == 1 and len(members) == len(batch)):
            given = group.call()
            group.answer(await given if inspect.isawaitable(given) else given)
    return [one.answer if one in members else None for one in batch]


# ---- text -----------------------------------------------------------------------------------------


async def _text(call: Callable[[Any], Any], asked: ChatRequest | CompletionRequest) -> AsyncGenerator[bytes]:
    documents: Documents = (
        ChatDocuments(asked) if isinstance(asked, ChatRequest) else CompletionDocuments(asked)
    )
    wanted = each_answer(asked)
    stops = Stops(asked.stop)
    choices = [Choice(asked.token_limit, stops) for _ in wanted]
    streams = [_deltas(call, one, choice) for one, choice in zip(wanted, choices, strict=True)]
    whole: list[list[Delta]] = [[] for _ in wanted]
    cost, with_logprobs = 0, bool(asked.logprobs)
    async with aclosing(merged(streams)) as deltas:
        async for index, delta in deltas:
            if asked.stream:
                yield documents.chunk(index, delta)
                continue
            whole[index].append(delta)
            cost += delta.cost(with_logprobs=with_logprobs)
            if cost > MAX_ANSWER_CHARACTERS:
                raise BadRequest(
                    f"the answer is over the limit of {MAX_ANSWER_CHARACTERS} characters for one that is not "
                    "streamed: expected stream: true, or smaller values of max_tokens and n",
                    "stream",
                )
    usage = _usage(choices, asked.n)
    if not asked.stream:
        yield documents.whole(whole, usage)
    elif asked.wants_usage:
        yield documents.usage(usage)


async def _deltas(call: Callable[[Any], Any], asked: Any, choice: Choice) -> AsyncGenerator[Delta]:
    """One answer, from what its callable gives."""
    if isinstance(asked, CompletionRequest) and asked.echo:
        yield Delta(asked.text)
    async with aclosing(each_given(call(asked))) as given:
        async for one in given:
            if (delta := choice.take(one)) is not None:
                yield delta
            if choice.over:
                return
    yield choice.end()


def _usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """The prompt of several answers counts once."""
    told = [one.usage for one in choices]
    prompts = [max(prompt for prompt, _ in told[start : start + n]) for start in range(0, len(told), n)]
    return usage_document(sum(prompts), sum(made for _, made in told))
