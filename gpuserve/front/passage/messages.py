"""Every message between the front and a door that is a process of its own. All of them, and nothing else.

::

    front -> door   DoorSetup, Connect, AdjustDoor, DoorLog, Announce, Renew, StopDoor,
                    AnswerPart, WholeAnswer, Start, Send, DropUnsent, Finish, Reset, Consumed,
                    Served, FrontStage, Outputs, Result, RefusedRequest, StreamEnded,
                    LendSegment, UnlendSegment, Freed
    door -> front   Holding, Status, TakenConnections, Left,
                    Opened, Body, Abandoned, Sent,
                    RequestTemplate, Alike, ForgetTemplates, Infer, TakenBack,
                    Closed, DoorSegment, DropDoorSegment

An *exchange* is one request at its connection, by a number that its door gives it and never uses again. What
a door does not answer itself it passes on as it came, and the front answers it as if it had come there.

Inference a door answers itself: it reads the request, has the front run it, by a *ticket* that it never uses
again, and writes the response. A large tensor stays where it is: inputs in the door's arena, outputs in the
workers', whose segments the front lends.

A door outlives its front. Each front has a socket pair of its own with it, so that no message of one front is
ever taken for one of another; tickets and numbers of exchanges go on.

Like the workers' wire (``gpuserve_worker.protocol.wire``): named tuples, msgpack arrays with a tag, several
in one datagram, descriptors beside a message that is alone in its own. Both ends are of one version.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve_worker.protocol.wire import Vocabulary

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


class DoorSetup(NamedTuple):
    """The first message of each front: the settings of the server, and which of its doors this one is, from 0
    on. ``idle_paths`` are how paths begin whose requests may be open while there is nothing to do.
    ``counted`` is what the processes before this one in its place have counted, by the fields of ``Status``;
    a door that has had a front before knows better.
    """

    settings: dict[str, Any]
    door: int
    idle_paths: tuple[str, ...]
    counted: dict[str, Any]


class Holding(NamedTuple):
    """The connections that a door has kept from a front before, by the addresses of their clients; this
    answers the ``DoorSetup`` of another front.
    """

    addresses: tuple[str | None, ...]


# Connections: the front accepts them, and counts them; a door has them.


class Connect(NamedTuple):
    """A connection that was accepted; its socket rides beside this. ``address`` is its client's, None on a
    unix socket. ``tls``: what comes on it is a handshake.
    """

    address: str | None
    tls: bool


class TakenConnections(NamedTuple):
    """So many more of the connections that were handed over are the door's, in their order. It is said before
    anything is read of them: if the door dies before, they are another's.
    """

    n: int


class Left(NamedTuple):
    """Connections that have ended since, by the addresses of their clients."""

    addresses: tuple[str | None, ...]


class AdjustDoor(NamedTuple):
    """Settings of the server that are others from now on, by name, as ``ServerSettings.to_wire`` has them."""

    settings: dict[str, Any]


class DoorLog(NamedTuple):
    """What is logged from now on, by the fields of ``LogSettings``."""

    settings: dict[str, Any]


class Announce(NamedTuple):
    """Tell clients to send no more requests. ``notice`` counts these: ``Status`` says which one it knows."""

    notice: int


class Renew(NamedTuple):
    """Use the files of TLS anew."""


class StopDoor(NamedTuple):
    """Close every connection once it is answered, and end."""


class Status(NamedTuple):
    """How a door is doing, said a few times a second: the last ``notice`` that it knows, how many connections
    are not aware of it and how many requests are held (``Transport``), what its ``Admission`` counts, by the
    same names, and what bodies take on its heap and in its arena. The first says that it takes connections.
    ``n_requests``, ``cpu_s`` (seconds of a core), ``refused``, ``late`` and ``intake_refused`` are of all its
    time, and that of the processes before it in its place.
    """

    notice: int
    n_unaware: int
    n_held: int
    n_requests: int
    cpu_s: float
    n_streams: int
    unsent_nbytes: int
    refused: dict[str, int]
    late: dict[str, int]
    limited: dict[str, int]
    intake_nbytes: int
    intake_refused: int
    arena_nbytes: int
    arena_blocks: int
    reclaimed: dict[str, int]


class SpentTokens(NamedTuple):
    """Tokens of the rate limiter that an ingress process granted since its last report, by client. The front
    sends them to all other ingress processes, which charge their own buckets.
    """

    spent: tuple[tuple[int | str | bytes, int], ...]


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


class AnswerPart(NamedTuple):
    """The next part of the body of the ``WholeAnswer`` to come; ``Sent`` follows."""

    exchange: int
    data: bytes


class WholeAnswer(NamedTuple):
    """``Exchange.answer``: the whole response, whose body are the parts before and this one."""

    exchange: int
    status: int
    headers: Headers
    trailers: Headers
    body: bytes


class Start(NamedTuple):
    """``Exchange.start``: the response begins."""

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
    """So many bytes of what ``AnswerPart`` and ``Send`` brought have left, or wait without being too many. Of
    few bytes it is not said until there are more.
    """

    exchange: int
    nbytes: int


class DropUnsent(NamedTuple):
    """``Exchange.drop_unsent``."""

    exchange: int


class Finish(NamedTuple):
    """``Exchange.finish``: the response ends."""

    exchange: int
    trailers: Headers


class Reset(NamedTuple):
    """``Exchange.reset``: the response breaks off."""

    exchange: int


class Consumed(NamedTuple):
    """``Exchange.consumed``: the front has used so many bytes of the body."""

    exchange: int
    nbytes: int


# Inference: what a door knows of models, and the requests that the front runs.


class Served(NamedTuple):
    """All of a model that gets requests from now on: of each version the spec (``ModelSpec.to_wire``), and
    whether it was ready once; none: it is served no more. ``states`` is what the supervisor says of its
    versions, as ``ModelTable.set_states`` takes it.
    """

    model: str
    versions: tuple[tuple[dict[str, Any], bool], ...]
    states: tuple[tuple[int, str, str], ...]


class FrontStage(NamedTuple):
    """What the front takes now: nothing new where it is ``draining``, and nothing is answered any more once
    it has ``ended``. ``tracing``: requests may be traced.
    """

    draining: bool
    ended: bool
    tracing: bool


class Infer(NamedTuple):
    """A request to be run, by the fields of ``InferRequest``. Each of ``inputs`` is a name, a datatype, a
    shape and the data: bytes, a place in the door's arena (segment, offset, nbytes), after which may come
    what was found wrong with its strings, or one in a client's region (name, offset, nbytes); each of
    ``placements`` a name and such a place. ``client`` is whom fair queues take it to be of: an address, and
    the headers that one of them asks for. ``received`` is there while requests may be traced: when it came,
    in nanoseconds, whether by gRPC, and the headers of its trace. ``stream``: it may have any number of
    responses.
    """

    ticket: int
    model: str
    version: str
    id: str
    parameters: dict[str, Any]
    inputs: tuple[Any, ...]
    outputs: tuple[str, ...]
    timeout_s: float | None
    priority: int
    empty_final: bool
    placements: tuple[Any, ...]
    sequence: tuple[int | str, bool, bool] | None
    client: tuple[str | bytes, Headers] | None
    received: tuple[int, bool, Headers] | None
    stream: bool


class RequestTemplate(NamedTuple):
    """What many requests have in common: the model, the outputs asked for, and of each input the name, the
    datatype and the shape. Of the other fields of ``Infer`` they have none, but maybe ``timeout_s``.
    """

    template: int
    model: str
    version: str
    outputs: tuple[str, ...]
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]


class Alike(NamedTuple):
    """Requests like a ``RequestTemplate``: of each the ticket, the template, ``timeout_s``, and the data of
    each input as in ``Infer``. Those that a batch was made of are answered together by ``Outputs``.
    """

    requests: tuple[tuple[Any, ...], ...]


class ForgetTemplates(NamedTuple):
    """No request will be like any template until now."""


class TakenBack(NamedTuple):
    """Nobody waits for the answers to these requests any more; there may be some on their way."""

    tickets: tuple[int, ...]


class Outputs(NamedTuple):
    """The outputs of a whole batch, as in ``Result``. Its requests have so many ``rows`` of each, in this
    order; those that are not this door's, or that nobody waits for, have 0 for a ticket.
    """

    tickets: tuple[int, ...]
    rows: tuple[int, ...]
    version: str
    tensors: tuple[Any, ...]
    lease: int


class Result(NamedTuple):
    """A response; ``final``: the only one of its request. Each of ``outputs`` is a name, a datatype, a shape
    and the data: bytes, a place in a lent segment (segment, offset, nbytes), or None where it lies in the
    client's region. What it refers to stays until ``Closed`` names its ``lease``, where that is not 0.
    """

    ticket: int
    version: str
    parameters: dict[str, Any]
    outputs: tuple[Any, ...]
    lease: int
    final: bool


class RefusedRequest(NamedTuple):
    """What became of a request is an error. ``untried``: it was refused, and is not known to the front."""

    ticket: int
    code: str
    text: str
    untried: bool


class StreamEnded(NamedTuple):
    """The stream of this request is at its end."""

    ticket: int


class Closed(NamedTuple):
    """The responses of these leases are written, or dropped."""

    leases: tuple[int, ...]


class DoorSegment(NamedTuple):
    """The door's arena has a new segment; its memfd rides beside this message."""

    segment: int
    nbytes: int


class DropDoorSegment(NamedTuple):
    """The door's arena gave a segment up; nothing will refer to it again."""

    segment: int


class Freed(NamedTuple):
    """Nobody reads these blocks of the door's arena any more: (segment, offset) each."""

    blocks: tuple[tuple[int, int], ...]


class LendSegment(NamedTuple):
    """A segment of a worker's arena, by a number of the front's; its memfd rides beside it."""

    segment: int
    nbytes: int


class UnlendSegment(NamedTuple):
    """No response will name this lent segment any more."""

    segment: int


# fmt: off
PASSAGE: Final = Vocabulary(dict(enumerate((
    DoorSetup, Connect, TakenConnections, Left, AdjustDoor, DoorLog, Announce, Renew, StopDoor, Status,
    Opened, Body, Abandoned, AnswerPart, WholeAnswer, Start, Send, Sent, DropUnsent, Finish, Reset,
    Consumed, Served, FrontStage, RequestTemplate, Alike, ForgetTemplates, Infer, TakenBack, Outputs,
    Result, RefusedRequest, StreamEnded, Closed, DoorSegment, DropDoorSegment, Freed, LendSegment,
    UnlendSegment, SpentTokens, Holding,
), start=1)))
# fmt: on
