"""The messages between the front and an ingress process.

    front -> ingress   IngressSetup, Connect, ChangeSettings, ChangeLogSettings, AnnounceShutdown, ReloadTls,
                       StopIngress, SpentTokens, WholeResponsePart, WholeResponse, ResponseStart,
                       ResponseData, DropUnsent, ResponseEnd, ResponseReset, BodyConsumed, PublishedModel,
                       FrontState, BatchOutputs, RequestResult, FailedRequest, StreamEnded, Lend, Unlend, Free
    ingress -> front   HeldConnections, IngressStatus, ReceivedConnections, ClosedConnections, SpentTokens,
                       RequestOpened, RequestBody, RequestAborted, ResponseCredit, RequestTemplate,
                       TemplatedRequests, ForgetTemplates, SubmitRequest, CancelRequests, LeasesClosed,
                       Segment, DropSegment

An *exchange* is one request at its connection, by a number that its ingress process never reuses. An ingress
process forwards requests that it does not answer unchanged, and the front answers them like any others.

Inference is answered in the ingress process: it parses the request, has the front run it under a *ticket*
that it never reuses, and writes the response. A large tensor stays where it is: inputs in the arena of the
ingress process, outputs in those of workers, whose segments the front lends.

An ingress process outlives its front. Each front has a socket pair of its own with it, so no message of one
front is mistaken for another's. Tickets and exchange numbers continue.

The encoding is that of the workers' wire (``gpuserve_worker.protocol.wire``): named tuples as msgpack arrays
with a tag, several in one datagram, descriptors beside a message that is alone. Both ends have one version.
The messages about segments of arenas are those of the wire.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve_worker.protocol.wire import DropSegment, Free, Lend, MessageCodec, Segment, Unlend

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


class IngressSetup(NamedTuple):
    """The first message of each front: the settings of the server, and the ``number`` of the ingress process,
    from 0 on. Requests for ``idle_paths`` may be open without work. ``counted`` are the totals of former
    processes of this number, by the fields of ``IngressStatus``, for a process that had no front before.
    """

    settings: dict[str, Any]
    number: int
    idle_paths: tuple[str, ...]
    counted: dict[str, Any]


class HeldConnections(NamedTuple):
    """The clients' addresses of connections kept from the previous front: the answer to ``IngressSetup``."""

    addresses: tuple[str | None, ...]


# Connections: the front accepts and counts them, and assigns each to an ingress process.


class Connect(NamedTuple):
    """An accepted connection with its socket. ``address``: None on a unix socket. ``tls``: TLS starts."""

    address: str | None
    tls: bool


class ReceivedConnections(NamedTuple):
    """The number of further received connections, in order. Others are assigned again after a death."""

    n: int


class ClosedConnections(NamedTuple):
    """The connections that have ended since the last message, by the addresses of their clients."""

    addresses: tuple[str | None, ...]


class ChangeSettings(NamedTuple):
    """Changed settings of the server, by name, as in ``ServerSettings.to_wire``."""

    settings: dict[str, Any]


class ChangeLogSettings(NamedTuple):
    """Changed settings of the log, by the fields of ``LogSettings``."""

    settings: dict[str, Any]


class AnnounceShutdown(NamedTuple):
    """An order to tell clients to send no more requests; ``notice`` counts these orders."""

    notice: int


class ReloadTls(NamedTuple):
    """An order to read the TLS files again."""


class StopIngress(NamedTuple):
    """An order to close every connection once it is answered, and exit."""


class IngressStatus(NamedTuple):
    """The heartbeat of an ingress process, a few times a second; the first one means that it takes
    connections.

    It contains the last ``notice`` received, the number of connections whose clients are unaware of it, the
    held requests (``ProtocolServer``), the counts of its ``Admission`` under the same names, and the size of
    bodies on its heap and in its arena. ``n_requests``, ``cpu_s`` (CPU seconds), ``refused``, ``late`` and
    ``intake_refused`` include all former processes with the same number.
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
    """Granted tokens of the rate limiter by client, which all other ingress processes charge as well."""

    spent: tuple[tuple[int | str | bytes, int], ...]


# Requests that the front answers.


class RequestOpened(NamedTuple):
    """A request's head, as ``Head`` and ``ConnectionEndpoints``; ``user`` if needed and known."""

    exchange: int
    method: str
    target: bytes
    headers: Headers
    http_version: str
    content_length: int | None
    scheme: str
    spelled: Headers
    client: tuple[str, int] | None
    server: tuple[str, int | None]
    tls: bool
    user: int | None


class RequestBody(NamedTuple):
    """The next part of the body; ``end`` marks the last one."""

    exchange: int
    data: bytes
    end: bool


class RequestAborted(NamedTuple):
    """The client is gone, or has its whole response: neither side sends any more of this exchange."""

    exchange: int


class WholeResponsePart(NamedTuple):
    """The next part of the body of a ``WholeResponse``, answered by ``ResponseCredit``."""

    exchange: int
    data: bytes


class WholeResponse(NamedTuple):
    """The end of a whole response (``Exchange.answer``). Its body are the former parts and this one."""

    exchange: int
    status: int
    headers: Headers
    trailers: Headers
    body: bytes


class ResponseStart(NamedTuple):
    """The start of a response (``Exchange.start``)."""

    exchange: int
    status: int
    headers: Headers
    end: bool


class ResponseData(NamedTuple):
    """A part of a response (``Exchange.send``), answered by ``ResponseCredit`` when there is room."""

    exchange: int
    data: bytes
    end: bool


class ResponseCredit(NamedTuple):
    """The response bytes that were sent or buffered. Small numbers are deferred until there are more."""

    exchange: int
    nbytes: int


class DropUnsent(NamedTuple):
    """An order to drop unsent data (``Exchange.drop_unsent``)."""

    exchange: int


class ResponseEnd(NamedTuple):
    """The end of a response (``Exchange.finish``)."""

    exchange: int
    trailers: Headers


class ResponseReset(NamedTuple):
    """The abnormal end of a response (``Exchange.reset``)."""

    exchange: int


class BodyConsumed(NamedTuple):
    """The number of bytes of the body that the front has consumed (``Exchange.consumed``)."""

    exchange: int
    nbytes: int


# Inference: the models that an ingress process knows, and the requests that the front runs.


class PublishedModel(NamedTuple):
    """A served model: spec (``ModelSpec.to_wire``) and whether it was ever ready, of each version; none if it
    is not served any more. ``states``: the states of its versions for ``ModelTable.set_states``.
    """

    model: str
    versions: tuple[tuple[dict[str, Any], bool], ...]
    states: tuple[tuple[int, str, str], ...]


class FrontState(NamedTuple):
    """The front's state: ``draining`` refuses requests, ``ended`` answers none; ``tracing`` may be on."""

    draining: bool
    ended: bool
    tracing: bool


class SubmitRequest(NamedTuple):
    """A request to run, by the fields of ``InferRequest``.

    Each of ``inputs`` is a name, a datatype, a shape and the data: bytes, a place in the arena of the ingress
    process (segment, offset, nbytes), optionally followed by the problem of its strings, or a place in a
    client's region (name, offset, nbytes). Each of ``placements`` is a name and such a place. ``client`` is
    the client for fair queues: an address, and the headers that a queue needs. ``received`` is set while
    requests may be traced: the arrival in nanoseconds, whether by gRPC, and the trace headers. ``stream``:
    the request may have any number of responses.
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
    """The common part of many requests: model, requested outputs, and name, datatype and shape of each input.
    Their other fields of ``SubmitRequest`` are empty, except ``timeout_s``.
    """

    template: int
    model: str
    version: str
    outputs: tuple[str, ...]
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]


class TemplatedRequests(NamedTuple):
    """Requests that fit a template: ticket, template, ``timeout_s``, and the data of each input, as in
    ``SubmitRequest``. A batch of them is answered by one ``BatchOutputs``.
    """

    requests: tuple[tuple[Any, ...], ...]


class ForgetTemplates(NamedTuple):
    """An order to forget all former templates."""


class UnreadRequest(NamedTuple):
    """A traced call that no model receives: of an unknown model, or malformed."""

    model: str
    code: str
    text: str
    began_ns: int
    is_grpc: bool
    headers: Headers


class CancelRequests(NamedTuple):
    """The cancelled requests. Their answers may already be on the way."""

    tickets: tuple[int, ...]


class BatchOutputs(NamedTuple):
    """The outputs of a batch, as in ``RequestResult``, with the ``rows`` of each request, in order. The
    ticket of other processes' and of cancelled requests is 0.
    """

    tickets: tuple[int, ...]
    rows: tuple[int, ...]
    version: str
    tensors: tuple[Any, ...]
    lease: int


class RequestResult(NamedTuple):
    """A response; ``final`` if it is the only one. Each of ``outputs`` is a name, a datatype, a shape and the
    data: bytes, a place in a lent segment (segment, offset, nbytes), or None if it lies in the client's
    region. The places stay valid until ``LeasesClosed`` names the ``lease``, unless that is 0.
    """

    ticket: int
    version: str
    parameters: dict[str, Any]
    outputs: tuple[Any, ...]
    lease: int
    final: bool


class FailedRequest(NamedTuple):
    """The error of a request. ``untried``: the request was refused, and the front does not know it."""

    ticket: int
    code: str
    text: str
    untried: bool


class StreamEnded(NamedTuple):
    """The end of the stream of a request."""

    ticket: int


class LeasesClosed(NamedTuple):
    """The leases whose responses were sent or dropped."""

    leases: tuple[int, ...]


# fmt: off
CHANNEL_MESSAGES: Final = MessageCodec(dict(enumerate((
    IngressSetup, Connect, ReceivedConnections, ClosedConnections, ChangeSettings, ChangeLogSettings,
    AnnounceShutdown, ReloadTls, StopIngress, IngressStatus, RequestOpened, RequestBody, RequestAborted,
    WholeResponsePart, WholeResponse, ResponseStart, ResponseData, ResponseCredit, DropUnsent, ResponseEnd,
    ResponseReset, BodyConsumed, PublishedModel, FrontState, RequestTemplate, TemplatedRequests,
    ForgetTemplates, SubmitRequest, CancelRequests, BatchOutputs, RequestResult, FailedRequest, StreamEnded,
    LeasesClosed, Segment, DropSegment, Free, Lend, Unlend, SpentTokens, HeldConnections, UnreadRequest,
), start=1)))
# fmt: on
