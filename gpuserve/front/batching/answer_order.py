"""Answers in the order in which their requests were accepted, though batches end in any order. Pure: it is
told what happens to requests, and says which answers may go. What an answer is, and how it goes, is the
caller's; so is memory that an answer holds while it is kept back here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)
A = TypeVar("A")


class AnswerOrder(Generic[R, A]):
    """Which answers wait for those of earlier requests; each one expected is answered or dropped at last."""

    def __init__(self) -> None:
        #: In order of acceptance, with the answers that are there: none, or one.
        self._expected: OrderedDict[R, list[A]] = OrderedDict()

    def expect(self, request: R) -> None:
        self._expected[request] = []

    def answer(self, request: R, answer: A) -> list[tuple[R, A]]:
        """The answers that may go now, in order; at once that to a request which was dropped."""
        kept = self._expected.get(request)
        if kept is None:
            return [(request, answer)]
        kept.append(answer)
        return self._release()

    def drop(self, request: R) -> list[tuple[R, A]]:
        """Forget a request that was cancelled or answered out of order; those that waited only for it."""
        own = [(request, answer) for answer in self._expected.pop(request, [])]
        return own + self._release()

    def _release(self) -> list[tuple[R, A]]:
        released: list[tuple[R, A]] = []
        while self._expected:
            request, answers = next(iter(self._expected.items()))
            if not answers:
                break
            del self._expected[request]
            released += [(request, answer) for answer in answers]
        return released

    def __len__(self) -> int:
        """How many requests are expected, or have an answer that waits."""
        return len(self._expected)
