"""A writer of nonsense in the style of a text: which word follows which, and nothing more."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve import Request

TEXT = Path(__file__).resolve().parents[2] / "docs" / "explanation.md"
Response = dict[str, NDArray[Any]]


class Writer:
    """Answers a prompt with words, one response each. Made once in each instance."""

    def __init__(self) -> None:
        words = TEXT.read_text(encoding="utf-8").split()
        self._followers: dict[str, list[str]] = {}
        for word, following in itertools.pairwise(words):
            self._followers.setdefault(word, []).append(following)
        self._starts = sorted(word for word in self._followers if word[:1].isupper())

    def __call__(self, requests: Sequence[Request]) -> Iterator[list[Response | None]]:
        """``prompt``: bytes [1, 1]; ``count``: int32 [1, 1]. Yields ``word``: bytes [1, 1], ``count`` times.

        Every response of the list is for one request; None where a request has had all its words.
        """
        stories = [self.story(_text(one), int(one["count"][0, 0])) for one in requests]
        while any(words := [next(story, None) for story in stories]):
            yield _responses(words)

    def story(self, prompt: str, count: int) -> Iterator[str]:
        """``count`` words, always the same ones for the same prompt."""
        chance = random.Random(prompt)
        word = (prompt.split() or [""])[-1]
        for _ in range(count):
            word = chance.choice(self._followers.get(word) or self._starts)
            yield word


class SlowWriter(Writer):
    """The same, as one that has to wait for every word: many stories are under way at once."""

    async def __call__(  # type: ignore[override]
        self, requests: Sequence[Request]
    ) -> AsyncIterator[list[Response | None]]:
        """As ``Writer``, each word after 20 ms."""
        stories = [self.story(_text(one), int(one["count"][0, 0])) for one in requests]
        while any(words := [next(story, None) for story in stories]):
            await asyncio.sleep(0.02)
            yield _responses(words)


def _text(request: Request) -> str:
    prompt: bytes = request["prompt"][0, 0]
    return prompt.decode()


def _responses(words: list[str | None]) -> list[Response | None]:
    return [{"word": np.array([[word.encode()]], dtype=object)} if word else None for word in words]
