"""Models of the benchmarks that give text piece by piece, at no cost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpuserve import Request
from gpuserve.openai import ChatRequest

WORD = "token "


def words(requests: list[Request]) -> Iterator[list[dict[str, np.ndarray]]]:
    """count: [1] INT32. Yields so many responses; text: [1] BYTES."""
    for _ in range(int(requests[0]["count"][0])):
        yield [{"text": np.array([WORD.encode()], dtype=object)}]


def chat(request: ChatRequest) -> Iterator[str]:
    """The same words, as many as the client allows."""
    for _ in range(request.max_tokens or 1):
        yield WORD
