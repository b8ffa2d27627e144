"""The models of ``scripts/attack`` besides ``echo``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import repeat

import numpy as np

from gpuserve.decorators import batch
from gpuserve.openai import ChatRequest, CompletionRequest, EmbeddingRequest

#: A request with this value first kills the worker.
POISON = -13.0
#: Of the text that a model for OpenAI's clients repeats.
MOST_LETTERS = 200_000


@batch
def mortal(x: np.ndarray) -> dict[str, np.ndarray]:
    """Return x, [rows, n] FP32, as y."""
    if (x[:, 0] == POISON).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return {"y": x}


class Talker:
    """Answers with the beginning of what it is asked, ``max_tokens`` times; each is one token."""

    def chat(self, request: ChatRequest) -> Iterator[str]:
        yield from repeat(request.messages[-1].text[:MOST_LETTERS], request.token_limit or 1)

    def complete(self, request: CompletionRequest) -> Iterator[str]:
        yield from repeat(request.text[:MOST_LETTERS], request.token_limit or 1)

    def embed(self, request: EmbeddingRequest) -> np.ndarray:
        return np.zeros((len(request.inputs), 4), np.float32)
