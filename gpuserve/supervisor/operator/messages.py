"""Every message between an operator's command and a running server. All of them, and nothing else.

::

    command -> server   Ask
    server -> command   Told and Alive (any number), Answered

One connection is one question. As everywhere between processes: named tuples, msgpack arrays with a tag, one
datagram each. Nothing is pickled, and no descriptor travels but that of an answer too large for a datagram.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from gpuserve_worker.vocabulary import Vocabulary

#: Raised whenever a field of a message changes meaning.
PROTOCOL: Final = 1
ALIVE_PERIOD_S: Final = 3.0


class Ask(NamedTuple):
    """A verb and its arguments; see ``OperatorVerbs``."""

    protocol: int
    verb: str
    arguments: dict[str, Any]


class Told(NamedTuple):
    """How it goes on: a line."""

    text: str


class Alive(NamedTuple):
    """The answer is still to come: every ``ALIVE_PERIOD_S``, so that a server that hangs is noticed."""


class Answered(NamedTuple):
    """How it ended: an ``Outcome``."""

    code: str
    text: str
    result: dict[str, Any]


OPERATE: Final = Vocabulary({1: Ask, 20: Told, 21: Answered, 22: Alive})
