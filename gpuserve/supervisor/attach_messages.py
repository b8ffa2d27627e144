"""Every message between an attached program and the server that it is attached to. All of them, and
nothing else.

::

    program -> server   Hello, BindModel, InstanceUp, InstanceDown, UnbindModel
    server -> program   Welcome, Bound, Refused, Replaced, Ended

As between the server and its front (``messages.py``): named tuples, msgpack arrays with a tag, one datagram
each, descriptors beside. Nothing is pickled, and no callable travels: the workers are the program's.

A program says ``Hello`` first and is answered by ``Welcome``, or by ``Ended`` where the two do not fit
together. A model is served once each of its instances has come up; ``Bound`` says so. The end of the
socket, on either side, is the end of the attachment.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from gpuserve_worker.wire import Vocabulary

#: Raised whenever a field of a message changes meaning.
PROTOCOL: Final = 1


# ---- program -> server ----------------------------------------------------------------------


class Hello(NamedTuple):
    """The first message: this protocol, and that of the program's workers (``wire.PROTOCOL``)."""

    protocol: int
    worker_protocol: int


class BindModel(NamedTuple):
    """A model to be served (``ModelSpec.to_wire``) as soon as its instances are up."""

    spec: dict[str, Any]


class InstanceUp(NamedTuple):
    """A worker is loaded, which took ``load_s``, and takes ``slots`` batches at once. Its link and its pidfd
    ride beside this.
    """

    model: str
    instance: str
    pid: int
    slots: int
    load_s: float = 0.0


class InstanceDown(NamedTuple):
    """A worker is dead. Its successor comes in ``restart_in_s``."""

    model: str
    instance: str
    reason: str
    restart_in_s: float


class UnbindModel(NamedTuple):
    """A model that is no more, or could not be loaded."""

    model: str


# ---- server -> program ----------------------------------------------------------------------


class Welcome(NamedTuple):
    """The server takes models. Its name, and its addresses by "http", "grpc", "metrics" and "health"."""

    name: str
    addresses: dict[str, str]


class Bound(NamedTuple):
    """A model is served from now on."""

    model: str


class Refused(NamedTuple):
    """A model is not served; ``text`` is a sentence that says why."""

    model: str
    text: str


class Replaced(NamedTuple):
    """Another program serves a model of this name now; this one's is forgotten."""

    model: str


class Ended(NamedTuple):
    """The server lets this program go; ``reason`` is a sentence."""

    reason: str


ATTACH: Final = Vocabulary(
    {
        1: Hello,
        2: BindModel,
        3: UnbindModel,
        4: InstanceUp,
        5: InstanceDown,
        20: Welcome,
        21: Bound,
        22: Refused,
        23: Replaced,
        24: Ended,
    }
)
