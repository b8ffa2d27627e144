"""Where an HTTP/1 connection is, and where it can go from there. The picture is in ``http1``."""

from __future__ import annotations

import enum
from typing import Final


class Stage(enum.Enum):
    """What the next bytes are, and who is waited for."""

    HEAD = "the head of a request, or nothing for a while"
    BODY = "the body of the request that is with its sink"
    ANSWER = "of a later request: this one is complete, and waits for its answer"
    DRAIN = "the rest of a request that is answered"
    LINGER = "of no interest: a client that still sends would lose the answer with the connection"
    CLOSED = "not read"

    #: Members are looked up all the time, and Enum's own is a Python function.
    __hash__ = object.__hash__


TRANSITIONS: Final[dict[Stage, frozenset[Stage]]] = {
    Stage.HEAD: frozenset({Stage.BODY, Stage.ANSWER, Stage.LINGER, Stage.CLOSED}),
    Stage.BODY: frozenset({Stage.ANSWER, Stage.DRAIN, Stage.LINGER, Stage.CLOSED}),
    Stage.ANSWER: frozenset({Stage.HEAD, Stage.CLOSED}),
    Stage.DRAIN: frozenset({Stage.HEAD, Stage.LINGER, Stage.CLOSED}),
    Stage.LINGER: frozenset({Stage.CLOSED}),
    Stage.CLOSED: frozenset(),
}
