"""Text generation: prompts in requests, pieces of text in responses, each as soon as its rows are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuserve.backends.huggingface.model_folders import ModelSettings
from gpuserve.backends.huggingface.prompt_batches import (
    OnPiece,
    Prompt,
    TextPiece,
    read_parameters,
)
from gpuserve.backends.huggingface.tasks import bytes_column, read_texts, task_declaration
from gpuserve.backends.huggingface.text_writer import TextWriter, put_in_loop
from gpuserve.core.errors import InvalidArgument

MAX_BATCH_SIZE: Final = 16
_PROMPT: Final = {"name": "prompt", "dtype": "bytes", "shape": [1]}
_OUTPUTS: Final = [
    {"name": "text", "dtype": "bytes", "shape": [1]},
    {"name": "tokens", "dtype": "int32", "shape": [1]},
    {"name": "finish_reason", "dtype": "bytes", "shape": [1]},
]


class RowPiece(NamedTuple):
    """A piece of text, or the error, of one row of one request of a batch."""

    request: int
    row: int
    piece: TextPiece | Exception


class TextGeneration:
    """A callable that answers a prompt with pieces of text, each in a response."""

    #: Members of requests of OpenAI's clients.
    honours = ("tools", "logprobs", "response_format")

    def __init__(self, settings: ModelSettings, _config: Mapping[str, Any]) -> None:
        self._writer = TextWriter(settings)

    @classmethod
    def declare(cls, settings: ModelSettings, _config: Mapping[str, Any]) -> dict[str, Any]:
        return task_declaration([_PROMPT], _OUTPUTS, MAX_BATCH_SIZE, decoupled=settings.stream)

    async def __call__(self, requests: Sequence[Any]) -> AsyncIterator[list[Any]]:
        batch = PromptRequests(self._writer, requests)
        if any(batch.refused):
            yield batch.refused
        try:
            while batch.rows:
                yield batch.responses(await batch.next_pieces())
        finally:
            batch.cancel()

    @property
    def chat(self) -> Callable[[Any], Any] | None:
        """The handler of a ChatRequest of OpenAI's clients, or None without a chat template."""
        return self.complete if self._writer.tokenizer.chat_template else None

    def complete(self, request: Any) -> AsyncIterator[Any]:
        """Answer a CompletionRequest or a ChatRequest of OpenAI's clients."""
        from gpuserve.backends.huggingface.openai_requests import generate_tokens

        return generate_tokens(self._writer, request)


class WholeTextGeneration(TextGeneration):
    """A callable that answers a prompt with its whole text at once."""

    async def __call__(self, requests: Sequence[Any]) -> list[Any]:  # type: ignore[override]
        batch = PromptRequests(self._writer, requests)
        pieces: list[RowPiece] = []
        try:
            while batch.rows:
                pieces += await batch.next_pieces()
        finally:
            batch.cancel()
        answers = batch.responses(pieces)
        return [
            refused or answer or _response([_joined(())] * count)
            for refused, answer, count in zip(batch.refused, answers, batch.counts, strict=True)
        ]


class PromptRequests:
    """The rows of all requests of a batch while they are generated. ``refused`` has the error of each request
    that cannot be answered, ``counts`` the number of rows of each request.
    """

    def __init__(self, writer: TextWriter, requests: Sequence[Any]) -> None:
        self._requests = requests
        self._pieces: asyncio.Queue[RowPiece] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        prompts = [_prompts_of(writer, one) for one in requests]
        self.refused = [one if isinstance(one, Exception) else None for one in prompts]
        self.counts = [0 if isinstance(one, Exception) else len(one) for one in prompts]
        places = [(at, row) for at, count in enumerate(self.counts) for row in range(count)]
        valid = [one for found in prompts if not isinstance(found, Exception) for one in found]
        rows = writer.submit_prompts(
            [(one, self._receiver(*place)) for one, place in zip(valid, places, strict=True)]
        )
        #: Unfinished rows, by request and row.
        self.rows = dict(zip(places, rows, strict=True))

    async def next_pieces(self) -> list[RowPiece]:
        """Wait for at least one piece, and return all new pieces. Rows of cancelled requests are ended."""
        found = [await self._pieces.get()]
        while not self._pieces.empty():
            found.append(self._pieces.get_nowait())
        for one in found:
            if isinstance(one.piece, Exception) or one.piece.finish_reason:
                self.rows.pop((one.request, one.row), None)
        for place, row in list(self.rows.items()):
            if getattr(self._requests[place[0]], "cancelled", False):
                row.cancel()
                del self.rows[place]
        return found

    def cancel(self) -> None:
        for row in self.rows.values():
            row.cancel()

    def responses(self, next_pieces: Sequence[RowPiece]) -> list[Any]:
        """Return one response for each request with new pieces. Its other rows have empty texts."""
        answers: list[Any] = [None] * len(self.counts)
        pieces: dict[int, dict[int, list[TextPiece]]] = {}
        for request, row, piece in next_pieces:
            if isinstance(piece, Exception):
                answers[request] = piece
            else:
                pieces.setdefault(request, {}).setdefault(row, []).append(piece)
        for request, rows in pieces.items():
            if answers[request] is None:
                each = [_joined(rows.get(row, [])) for row in range(self.counts[request])]
                answers[request] = _response(each)
        return answers

    def _receiver(self, request: int, row: int) -> OnPiece:
        def receive_piece(piece: TextPiece | Exception) -> None:
            put_in_loop(self._loop, self._pieces, RowPiece(request, row, piece))

        return receive_piece


def _prompts_of(writer: TextWriter, request: Any) -> list[Prompt] | InvalidArgument:
    try:
        options = read_parameters(getattr(request, "parameters", {}))
        return [writer.text_prompt(text, options) for text in read_texts("prompt", request)]
    except (InvalidArgument, ValueError) as error:
        return error if isinstance(error, InvalidArgument) else InvalidArgument(str(error))


def _joined(pieces: Sequence[TextPiece]) -> TextPiece:
    reason = pieces[-1].finish_reason if pieces else ""
    return TextPiece("".join([one.text for one in pieces]), sum([one.tokens for one in pieces]), reason)


def _response(rows: Sequence[TextPiece]) -> dict[str, NDArray[Any]]:
    return {
        "text": bytes_column([one.text for one in rows]),
        "tokens": np.array([[one.tokens] for one in rows], dtype=np.int32),
        "finish_reason": bytes_column([one.finish_reason for one in rows]),
    }
