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
        """``prompt``: bytes [rows, 1]; ``count``: int32 [rows, 1]. Yields ``word``: bytes [rows, 1].

        Every response of the list is for one request; None where a request has had all its words. A row
        that has had its own has empty ones until all rows of its request have.
        """
        told = [self.stories(request) for request in requests]
        while any(words := [next(stories, None) for stories in told]):
            yield _responses(words)

    def stories(self, request: Request) -> Iterator[tuple[str, ...]]:
        """The next word of each row of a request, until the longest story has ended.

        A prompt that is not UTF-8 is no error: one would end the stories of all requests of the batch.
        """
        rows = zip(request["prompt"][:, 0], request["count"][:, 0], strict=True)
        stories = [self.story(prompt.decode(errors="replace"), int(count)) for prompt, count in rows]
        return itertools.zip_longest(*stories, fillvalue="")

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
        told = [self.stories(request) for request in requests]
        while any(words := [next(stories, None) for stories in told]):
            await asyncio.sleep(0.02)
            yield _responses(words)


def _responses(words: list[tuple[str, ...] | None]) -> list[Response | None]:
    return [None if rows is None else _response(rows) for rows in words]


def _response(rows: tuple[str, ...]) -> Response:
    return {"word": np.array([[word.encode()] for word in rows], dtype=object)}
