"""A callable of one's own for OpenAI's clients: says what it was told, word by word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gpuserve.openai import ChatRequest, Usage


class Parrot:
    """Answers any message with its own words. Each ``yield`` is a chunk for the client."""

    async def chat(self, request: ChatRequest) -> AsyncIterator[str | Usage]:
        """The words of the last message, each after 20 ms."""
        words = request.messages[-1].text.split()
        yield Usage(prompt_tokens=len(words))
        for number, word in enumerate(words):
            await asyncio.sleep(0.02)
            yield word if number == 0 else f" {word}"
