"""What became of each request: the load (``load.py``) notes it, the report counts it.

``Outcomes.lost`` is the word of the whole proof; everything else explains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kinds of requests."""

    GRPC_UNARY = "ModelInfer"
    GRPC_STREAM = "ModelStreamInfer"
    HTTP_INFER = "infer"
    HTTP_STREAM = "generate_stream"


class Way(Enum):
    """The ways from the client to a pod."""

    DIRECT = "direct"
    ENVOY = "Envoy"


class Outcome(NamedTuple):
    """One request. Times are of ``time.monotonic``; ``due_s`` was fixed beforehand.

    ``lost`` says why it was not answered rightly, and is "" where it was. ``at`` is the pod's address, where
    the client knows it. ``answers``: how many parts of the answer had come.
    """

    kind: Kind
    way: Way
    due_s: float
    ended_s: float
    lost: str = ""
    retried: bool = False
    at: str = ""
    answers: int = 0

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.due_s


class Outcomes:
    """All of them, in the order in which they ended."""

    def __init__(self) -> None:
        self.all: list[Outcome] = []

    def note(self, outcome: Outcome) -> None:
        self.all.append(outcome)

    @property
    def lost(self) -> list[Outcome]:
        return [one for one in self.all if one.lost]

    def of(self, kind: Kind | None = None, way: Way | None = None) -> Iterator[Outcome]:
        """Those of a kind and a way; None is any."""
        return (one for one in self.all if kind in (None, one.kind) and way in (None, one.way))

    def during(self, began_s: float, ended_s: float) -> Iterator[Outcome]:
        """The outcomes of requests that were due in this time."""
        return (one for one in self.all if began_s <= one.due_s < ended_s)
