"""Callables for OpenAI's clients. What they answer follows from what they are asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpuserve.openai import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Embeddings,
    Token,
    ToolCall,
    Usage,
)


class Talker:
    """Says what it was told last, three characters at a time."""

    honours = ("logprobs",)

    def chat(self, request: ChatRequest) -> Iterator[Any]:
        said = request.messages[-1].text
        if said == "break before":
            raise RuntimeError("the talker broke")
        if said == "refuse":
            raise BadRequest("nobody says that", param="messages")
        yield Usage(prompt_tokens=len(request.messages))
        if said == "seed":
            said = f"{request.seed} {request.temperature} {request.top_p}"
        if said == "forwarded":
            said = str(request.parameters.get("x-tenant"))
        if said == "extra":
            said = str(request.model_extra)
        for start in range(0, len(said), 3):
            yield said[start : start + 3]
            if said == "break after":
                raise RuntimeError("the talker broke")

    def complete(self, request: CompletionRequest) -> Any:
        if request.logprobs is not None:
            return [
                Token("a", logprob=-0.5, top_logprobs=[("a", -0.5), ("b", -1.5)]),
                Token("b", logprob=-1.0),
            ]
        if isinstance(request.prompt, list):
            return [*map(str, request.prompt), Usage(prompt_tokens=len(request.prompt))]
        return request.text.upper()

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        await asyncio.sleep(0)
        rows = [[3.0, 4.0, float(len(one))] for one in request.inputs]
        return Embeddings(np.array(rows), prompt_tokens=sum(len(one) for one in request.inputs))


class Tools:
    """Calls each of the tools that it is given, its arguments in two pieces."""

    honours = ("tools", "response_format", "logprobs")

    async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
        for index, tool in enumerate(request.tools or []):
            yield ToolCall(tool["function"]["name"], '{"a"', index=index)
            await asyncio.sleep(0)
            yield ToolCall(arguments=": 1}", index=index)
        if request.response_format is not None:
            yield Token(request.response_format["type"], logprob=-0.25, top_logprobs=[("x", -2.0)])


def note_end() -> None:
    Path(os.environ["OPENAI_CLOSED_AT"]).write_text("closed")


def is_open() -> bool:
    return Path(os.environ["OPENAI_GATE"]).exists()


async def endless(request: ChatRequest) -> AsyncIterator[str]:
    """Goes on until it is closed, which it notes in a file."""
    try:
        while True:
            yield "on "
            await asyncio.sleep(0.001)
    finally:
        note_end()


async def gated(request: ChatRequest) -> AsyncIterator[str]:
    """Begins, and ends when there is a file."""
    yield "begun"
    while not is_open():  # noqa: ASYNC110 - a file is what another process can make
        await asyncio.sleep(0.005)
    yield " ended"


class Vectors:
    """The length of each text, and how many texts were in the call."""

    def embed(self, texts: list[str]) -> Any:
        vectors = np.array([[len(one), len(texts)] for one in texts], np.float32)
        return Embeddings(vectors, prompt_tokens=[len(one) for one in texts])
