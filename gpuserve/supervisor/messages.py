"""Every message between the supervisor and the front. All of them, and nothing else.

::

    supervisor -> front   Setup, AddModel, RemoveModel, InstanceUp, InstanceDown, Serving, Drain, Quit
    front -> supervisor   FrontReady, Drained

Like the workers' wire (``gpuserve_worker.wire``): named tuples, msgpack arrays with a tag, one
datagram each, descriptors beside. Nothing is pickled.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve_worker.wire import Vocabulary


class Setup(NamedTuple):
    """The first message: the settings, and the listeners' descriptors beside it, in this order.

    ``epoch`` counts the fronts of this server; links are taken over with it.
    ``listeners`` are the roles of the descriptors: "http", "grpc", "metrics".
    """

    epoch: int
    settings: dict[str, Any]
    listeners: tuple[str, ...]


class AddModel(NamedTuple):
    """A model that exists from now on (``ModelSpec.to_wire``); its instances come up later.

    An ``attached`` one lives in another program: the server can be ready without it.
    """

    spec: dict[str, Any]
    attached: bool


class RemoveModel(NamedTuple):
    """A model that is no more."""

    model: str


class InstanceUp(NamedTuple):
    """A worker is loaded, and takes ``slots`` batches at once. Its link and its pidfd ride beside this."""

    model: str
    instance: str
    pid: int
    slots: int


class InstanceDown(NamedTuple):
    """A worker is dead, or must get no more batches. Its successor comes in ``restart_in_s``."""

    model: str
    instance: str
    reason: str
    restart_in_s: float


class Serving(NamedTuple):
    """Every model of the start is loaded: the server may say that it is ready."""


class Drain(NamedTuple):
    """Say not ready, take nothing new, finish what is queued, then answer ``Drained``."""

    timeout_s: float


class Quit(NamedTuple):
    """Close the connections and exit with status 0."""


class FrontReady(NamedTuple):
    """The listeners are being accepted from."""


class Drained(NamedTuple):
    """Nothing is in flight any more; ``unfinished`` requests were given up at the timeout."""

    unfinished: int


ControlMessage: TypeAlias = (
    Setup | AddModel | RemoveModel | InstanceUp | InstanceDown | Serving | Drain | Quit | FrontReady | Drained
)

CONTROL: Final = Vocabulary(
    {
        1: Setup,
        2: AddModel,
        3: RemoveModel,
        4: InstanceUp,
        5: InstanceDown,
        6: Serving,
        7: Drain,
        8: Quit,
        20: FrontReady,
        21: Drained,
    }
)
