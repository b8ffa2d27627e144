"""Text written token by token: prompts in requests, pieces of text in responses. Each request is answered as
fast as its own rows are; which prompts are computed together is decided in ``batching``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuserve.core.errors import InvalidArgument
from gpuserve.runtimes.huggingface.batching import PromptBatches, Row, Tell
from gpuserve.runtimes.huggingface.libraries import load_pipeline
from gpuserve.runtimes.huggingface.prompts import (
    MAX_NEW_TOKENS,
    Piece,
    Prompt,
    Sampling,
    prompt_of,
    read_parameters,
)
from gpuserve.runtimes.huggingface.requests import column, declared, texts_in
from gpuserve.runtimes.huggingface.settings import Settings
from gpuserve.runtimes.huggingface.tokens import SharedTokens

MAX_BATCH_SIZE: Final = 16
_PROMPT: Final = {"name": "prompt", "dtype": "bytes", "shape": [1]}
_OUTPUTS: Final = [
    {"name": "text", "dtype": "bytes", "shape": [1]},
    {"name": "tokens", "dtype": "int32", "shape": [1]},
    {"name": "finish_reason", "dtype": "bytes", "shape": [1]},
]
_read = texts_in("prompt")


class Written(NamedTuple):
    """Something of one row of one request of a batch."""

    request: int
    row: int
    piece: Piece | Exception


class Writer:
    """A model that writes text, and how prompts become tokens for it."""

    def __init__(self, settings: Settings) -> None:
        pipeline = load_pipeline(settings, "text-generation")
        self.tokenizer = pipeline.tokenizer
        self.tokens = SharedTokens()
        self._config = pipeline.model.generation_config
        self._longest = getattr(pipeline.model.config, "max_position_embeddings", None)
        #: Tokens are numbers below this one.
        self.vocabulary = int(pipeline.model.get_input_embeddings().num_embeddings)
        self._sampling = _folder_sampling(self._config)
        self._batches = PromptBatches(
            pipeline.model, self.tokenizer, rows=settings.prompts, batches=settings.batches
        )

    def prompt(self, text: str, said: Mapping[str, Any]) -> Prompt:
        """The prompt in a text, with what was said of how to answer it; raises InvalidArgument."""
        return self.prompt_of_tokens(self.tokenizer(text)["input_ids"], said)

    def prompt_of_tokens(self, tokens: Sequence[int], said: Mapping[str, Any]) -> Prompt:
        limit = self._config.max_new_tokens or MAX_NEW_TOKENS
        return prompt_of(tokens, said, self._sampling, limit, self._longest)

    @property
    def unlimited(self) -> dict[str, Any]:
        """What is said of a prompt whose answer may be as long as the folder and the model let it."""
        limit = self._config.max_new_tokens or self._longest
        return {} if limit is None else {"max_new_tokens": limit}

    def begin(self, prompts: Sequence[tuple[Prompt, Tell]]) -> list[Row]:
        return self._batches.begin(prompts)

    async def write(self, prompt: Prompt) -> AsyncGenerator[Piece]:
        """The pieces of one answer. No more is made when this is closed."""
        told: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        (row,) = self.begin([(prompt, _into(told))])
        try:
            while True:
                piece = await told.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish_reason:
                    return
        finally:
            row.cancel()


class TextGeneration:
    """Answers a prompt with pieces of text, one response each; the last one of a row says why it ends."""

    def __init__(self, settings: Settings, _config: Mapping[str, Any]) -> None:
        self._writer = Writer(settings)

    @classmethod
    def declare(cls, settings: Settings, _config: Mapping[str, Any]) -> dict[str, Any]:
        return declared([_PROMPT], _OUTPUTS, MAX_BATCH_SIZE, decoupled=settings.stream)

    async def __call__(self, requests: Sequence[Any]) -> AsyncIterator[list[Any]]:
        batch = BatchOfPrompts(self._writer, requests)
        if any(batch.refused):
            yield batch.refused
        try:
            while batch.is_open:
                yield batch.responses(await batch.written())
        finally:
            batch.cancel()

    @property
    def chat(self) -> Callable[[Any], Any] | None:
        """Answers a ChatRequest of OpenAI's clients; None: the folder has no template for chats."""
        return self._chat if self._writer.tokenizer.chat_template else None

    def _chat(self, request: Any) -> AsyncIterator[Any]:
        from gpuserve.runtimes.huggingface import openai_requests

        return openai_requests.tokens_of(self._writer, request, openai_requests.chat_prompt)

    def complete(self, request: Any) -> AsyncIterator[Any]:
        """Answers a CompletionRequest of OpenAI's clients."""
        from gpuserve.runtimes.huggingface import openai_requests

        return openai_requests.tokens_of(self._writer, request, openai_requests.completion_prompt)


class WholeTextGeneration(TextGeneration):
    """Answers a prompt with all of its text at once."""

    async def __call__(self, requests: Sequence[Any]) -> list[Any]:  # type: ignore[override]
        batch = BatchOfPrompts(self._writer, requests)
        pieces: dict[tuple[int, int], list[Piece]] = {}
        failed: dict[int, Exception] = {}
        try:
            while batch.is_open:
                for one in await batch.written():
                    if isinstance(one.piece, Exception):
                        failed[one.request] = one.piece
                    else:
                        pieces.setdefault((one.request, one.row), []).append(one.piece)
        finally:
            batch.cancel()
        return [
            failed.get(at)
            or batch.refused[at]
            or _response([_joined(pieces.get((at, row), [])) for row in range(count)])
            for at, count in enumerate(batch.counts)
        ]


class BatchOfPrompts:
    """The rows of all requests of a batch while they are written. ``refused`` has the error of each request
    that cannot be answered, ``counts`` how many rows each has.
    """

    def __init__(self, writer: Writer, requests: Sequence[Any]) -> None:
        self._requests = requests
        self._told: asyncio.Queue[Written] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        prompts = [_prompts(writer, one) for one in requests]
        self.refused = [one if isinstance(one, Exception) else None for one in prompts]
        self.counts = [0 if isinstance(one, Exception) else len(one) for one in prompts]
        self._places = [(at, row) for at, count in enumerate(self.counts) for row in range(count)]
        asked = [one for found in prompts if not isinstance(found, Exception) for one in found]
        begun = writer.begin(
            [(one, self._teller(*place)) for one, place in zip(asked, self._places, strict=True)]
        )
        #: Those that are not over, by request and row.
        self._rows = dict(zip(self._places, begun, strict=True))

    @property
    def is_open(self) -> bool:
        return bool(self._rows)

    async def written(self) -> list[Written]:
        """What came since the last time, at least one; of requests that somebody still waits for."""
        found = [await self._told.get()]
        while not self._told.empty():
            found.append(self._told.get_nowait())
        for one in found:
            if isinstance(one.piece, Exception) or one.piece.finish_reason:
                self._rows.pop((one.request, one.row), None)
        for place, row in list(self._rows.items()):
            if getattr(self._requests[place[0]], "cancelled", False):
                row.cancel()
                del self._rows[place]
        return found

    def cancel(self) -> None:
        for row in self._rows.values():
            row.cancel()

    def responses(self, written: Sequence[Written]) -> list[Any]:
        """One response for each request of which something came; an empty text for its other rows."""
        answers: list[Any] = [None] * len(self.counts)
        pieces: dict[int, dict[int, list[Piece]]] = {}
        for request, row, piece in written:
            if isinstance(piece, Exception):
                answers[request] = piece
            else:
                pieces.setdefault(request, {}).setdefault(row, []).append(piece)
        for request, rows in pieces.items():
            if answers[request] is None:
                each = [_joined(rows.get(row, [])) for row in range(self.counts[request])]
                answers[request] = _response(each)
        return answers

    def _teller(self, request: int, row: int) -> Tell:
        def tell(piece: Piece | Exception) -> None:
            _call_in(self._loop, self._told, Written(request, row, piece))

        return tell


def _prompts(writer: Writer, request: Any) -> list[Prompt] | InvalidArgument:
    try:
        said = read_parameters(getattr(request, "parameters", {}))
        return [writer.prompt(text, said) for text in _read(request)]
    except (InvalidArgument, ValueError) as error:
        return error if isinstance(error, InvalidArgument) else InvalidArgument(str(error))


def _joined(pieces: Sequence[Piece]) -> Piece:
    reason = pieces[-1].finish_reason if pieces else ""
    return Piece("".join([one.text for one in pieces]), sum([one.tokens for one in pieces]), reason)


def _response(rows: Sequence[Piece]) -> dict[str, NDArray[Any]]:
    return {
        "text": column([one.text for one in rows]),
        "tokens": np.array([[one.tokens] for one in rows], dtype=np.int32),
        "finish_reason": column([one.finish_reason for one in rows]),
    }


def _into(told: asyncio.Queue[Piece | Exception]) -> Tell:
    loop = asyncio.get_running_loop()

    def tell(piece: Piece | Exception) -> None:
        _call_in(loop, told, piece)

    return tell


def _call_in(loop: asyncio.AbstractEventLoop, told: asyncio.Queue[Any], one: Any) -> None:
    try:
        loop.call_soon_threadsafe(told.put_nowait, one)
    except RuntimeError:  # the loop has ended, and with it whoever waited
        pass


def _folder_sampling(config: Any) -> Sampling:
    """What the folder says of sampling, for requests that say nothing."""
    penalty = config.repetition_penalty or 1.0
    if not config.do_sample:
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=50 if config.top_k is None else config.top_k,
        top_p=1.0 if config.top_p is None else config.top_p,
        repetition_penalty=penalty,
    )
