"""Every message between the front and a door that is a process of its own. All of them, and nothing else.

::

    front -> door   Setup, Connect, Adjust, Announce, Renew, Stop,
                    Answer, Start, Send, DropUnsent, Finish, Reset, Consumed
    door -> front   Status, Left,
                    Opened, Body, Abandoned, Sent

An *exchange* is one request at its connection, by a number that its door gives it and never uses again. What
a door does not answer itself it passes on as it came, and the front answers it as if it had come there.

Like the workers' wire (``gpuserve_worker.protocol.wire``): named tuples, msgpack arrays with a tag, several
in one datagram, descriptors beside a message that is alone in its own. Both ends are of one version.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve_worker.protocol.wire import Vocabulary

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


class Setup(NamedTuple):
    """The first message: the settings of the server, and which of its doors this one is, from 0 on."""

    settings: dict[str, Any]
    door: int


# Connections: the front accepts them, and counts them; a door has them.


class Connect(NamedTuple):
    """A connection that was accepted; its socket rides beside this. ``address`` is its client's, None on a
    unix socket. ``tls``: what comes on it is a handshake.
    """

    address: str | None
    tls: bool


class Left(NamedTuple):
    """Connections that have ended since, by the addresses of their clients."""

    addresses: tuple[str | None, ...]


class Adjust(NamedTuple):
    """Settings of the server that are others from now on, by name, as ``ServerSettings.to_wire`` has them."""

    settings: dict[str, Any]


class Announce(NamedTuple):
    """Tell clients to send no more requests. ``notice`` counts these: ``Status`` says which one it knows."""

    notice: int


class Renew(NamedTuple):
    """Use the files of TLS anew."""


class Stop(NamedTuple):
    """Close every connection once it is answered, and end."""


class Status(NamedTuple):
    """How a door is doing, said a few times a second: the last ``notice`` that it knows, how many connections
    are not aware of it and how many requests are held (``Transport``), what its ``Admission`` counts, by the
    same names, and what bodies take on its heap.
    """

    notice: int
    n_unaware: int
    n_held: int
    n_streams: int
    unsent_nbytes: int
    refused: dict[str, int]
    late: dict[str, int]
    intake_nbytes: int
    intake_refused: int


# A request that the front answers.


class Opened(NamedTuple):
    """A request whose head has come, by the fields of ``Head`` and of ``Ends``. ``user`` is who sent it,
    where that was asked for and is known (``doors/access/users.py``).
    """

    exchange: int
    method: str
    target: bytes
    headers: Headers
    http_version: str
    content_length: int | None
    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int | None]
    tls: bool
    user: int | None


class Body(NamedTuple):
    """The next part of the body; ``end``: the last."""

    exchange: int
    data: bytes
    end: bool


class Abandoned(NamedTuple):
    """The client has gone, or has its whole response: nothing more comes, and nothing more is sent."""

    exchange: int


class Answer(NamedTuple):
    """``Exchange.answer``: the whole response."""

    exchange: int
    status: int
    headers: Headers
    trailers: Headers
    body: bytes


class Start(NamedTuple):
    """``Exchange.start``."""

    exchange: int
    status: int
    headers: Headers
    end: bool


class Send(NamedTuple):
    """``Exchange.send``; ``Sent`` follows once there is room for more."""

    exchange: int
    data: bytes
    end: bool


class Sent(NamedTuple):
    """So many bytes of what ``Send`` brought have left, or wait without being too many."""

    exchange: int
    nbytes: int


class DropUnsent(NamedTuple):
    """``Exchange.drop_unsent``."""

    exchange: int


class Finish(NamedTuple):
    """``Exchange.finish``."""

    exchange: int
    trailers: Headers


class Reset(NamedTuple):
    """``Exchange.reset``."""

    exchange: int


class Consumed(NamedTuple):
    """``Exchange.consumed``: the front has used so many bytes of the body."""

    exchange: int
    nbytes: int


# fmt: off
PASSAGE: Final = Vocabulary(dict(enumerate((
    Setup, Connect, Left, Adjust, Announce, Renew, Stop, Status, Opened, Body, Abandoned, Answer, Start, Send,
    Sent, DropUnsent, Finish, Reset, Consumed,
), start=1)))
# fmt: on
