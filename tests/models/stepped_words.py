"""A stepped callable for OpenAI's clients."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gpuserve import Last, Later
from gpuserve.openai import BadRequest, ChatRequest, CompletionRequest, Token


class Words:
    """Words for OpenAI's clients: those of the prompt, one a step."""

    max_active = 3

    def __init__(self) -> None:
        self._active = 0

    def admit(self, request: ChatRequest | CompletionRequest) -> list[str]:
        if self._active >= self.max_active:
            raise Later
        if request.max_tokens == 13:
            raise BadRequest("an unlucky number", "max_tokens")
        self._active += 1
        text = request.messages[-1].text if isinstance(request, ChatRequest) else request.text
        return [f"{word} " for word in text.split()]

    def step(self, active: Sequence[list[str]]) -> list[Any]:
        time.sleep(0.001)
        return [Token(words.pop(0)) if len(words) > 1 else Last(words[0]) for words in active]

    def release(self, state: list[str]) -> None:
        self._active -= 1
