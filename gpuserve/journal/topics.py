"""What subscribers of the event stream can ask for: the first frame of an event, ``KIND/MODEL``, of which a
subscription is a beginning. Pure.
"""

from __future__ import annotations

from typing import Final

from gpuserve.journal.kinds import EventKind

#: Who subscribes to this and something of its own is answered once: by then all that it subscribed to before
#: is known.
HELLO: Final = b"hello/"
_SUBSCRIBE: Final = b"\1"


def topic(kind: EventKind, model: str = "") -> bytes:
    """Return the topic of an event; without a model, what the topics of all events of the kind begin with."""
    return f"{kind.value}/{model}".encode()


class Subscriptions:
    """What all subscribers together want, by what the publishing socket says of them."""

    def __init__(self) -> None:
        self._prefixes: set[bytes] = set()

    def hear(self, message: bytes) -> bytes:
        """Note the first subscription of a prefix (1 and the prefix), or that its last one has ended (0).
        Return a greeting that is to be answered, by a message of that topic, or nothing.
        """
        prefix = message[1:]
        if message[:1] != _SUBSCRIBE:
            self._prefixes.discard(prefix)
            return b""
        self._prefixes.add(prefix)
        return prefix if prefix.startswith(HELLO) else b""

    def wants(self, wanted: bytes) -> bool:
        return any(wanted.startswith(one) for one in self._prefixes)

    def wants_some(self, kind: EventKind) -> bool:
        """Whether there is a model whose events of the kind somebody wants."""
        start = topic(kind)
        return any(one.startswith(start) or start.startswith(one) for one in self._prefixes)
