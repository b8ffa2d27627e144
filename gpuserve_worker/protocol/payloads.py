"""The parts of messages that describe tensors, requests and memory, and their decoding. Pure, as ``wire.py``,
which has the messages.

Memory is referred to by numbers that the sender of the memory assigned: a segment of the sender's arena
(``Ref``), a region that a client registered (``Place``), a segment of another worker's arena that the front
lends (``Loan``), and exported memory of a device (``Exported`` by its worker, lent to other workers as
``DeviceLoan``).
"""

import functools
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeAlias

#: Tensors up to this many bytes a batch travel inside the message, not in an arena. Below it the
#: bookkeeping of an arena block costs more than copying the bytes through the socket.
INLINE_NBYTES: Final = 16 * 1024


#: Values of ``kind``.
REGION: Final = "region"
LOAN: Final = "loan"
PARTS: Final = "parts"
EXPORTED: Final = "exported"
DEVICE_LOAN: Final = "device loan"


class Ref(NamedTuple):
    """A range of bytes in an arena of the sender: segment, offset and length."""

    segment: int
    offset: int
    nbytes: int


class Place(NamedTuple):
    """A range of bytes in a client's region. ``kind`` distinguishes a place from other tuples of numbers."""

    region: int
    offset: int
    nbytes: int
    kind: str = REGION


class Loan(NamedTuple):
    """A range of bytes in another worker's arena, under the front's number for the lent segment."""

    segment: int
    offset: int
    nbytes: int
    kind: str = LOAN


class Exported(NamedTuple):
    """The location of an output in the sender's exported device memory. The output is complete."""

    segment: int
    offset: int
    nbytes: int
    kind: str = EXPORTED


class DeviceLoan(NamedTuple):
    """A range of bytes in another worker's exported device memory, under the number that the front lent the
    memory by. If ``in_place``, the callable may be given these bytes without a copy, because they are on its
    own device.
    """

    segment: int
    offset: int
    nbytes: int
    kind: str = DEVICE_LOAN
    in_place: bool = False


class Parts(NamedTuple):
    """The rows of a batch that are not joined: one payload for each request, in request order. Only inputs
    that go to a device come as parts; the copy to the device joins them.
    """

    parts: tuple[bytes | Ref | Place | Loan | DeviceLoan, ...]
    kind: str = PARTS


_KINDS: Final[dict[str, Any]] = {REGION: Place, LOAN: Loan, DEVICE_LOAN: DeviceLoan, EXPORTED: Exported}
#: The bytes of a tensor: inline if small, otherwise a location in some memory.
Payload: TypeAlias = bytes | Ref | Place | Loan | Parts | Exported | DeviceLoan


class WireTensor(NamedTuple):
    """One tensor of a whole batch. ``shape`` is complete, with the batch dimension.

    A ragged tensor has the elements of all requests one after the other. Its ``shape`` is a tuple with the
    shape of each request.
    """

    name: str
    datatype: str
    shape: tuple[Any, ...]
    payload: Payload


class Sequence(NamedTuple):
    """A request's sequence: its correlation id, and whether it is the first or last request in it."""

    id: int | str
    start: bool
    end: bool


class RequestDetails(NamedTuple):
    """Optional attributes that a client gave its request: ``id`` ("": none), ``priority`` (0: the model's
    default) and time limit (0: none).
    """

    id: str = ""
    priority: int = 0
    timeout_s: float = 0.0


class WireRequest(NamedTuple):
    """The attributes of one request of a batch, besides its rows of the tensors. A request without any
    attribute is encoded as its number of rows. ``placements`` are the outputs to write into a client's
    region, by name; the response then has a ``Place`` with the number of written bytes. ``sequence`` is (id,
    start, end). ``kept`` are the outputs that other workers read and that may stay on the device. ``details``
    are ``RequestDetails``, for models that ask for them.
    """

    rows: int
    parameters: dict[str, Any]
    requested_outputs: tuple[str, ...]
    placements: tuple[tuple[str, Place], ...] = ()
    sequence: tuple[int | str, bool, bool] | None = None
    kept: tuple[str, ...] = ()
    details: tuple[str, int, float] | None = None


class WireFailure(NamedTuple):
    """The failure of one request or of a whole batch. ``code`` is a name of ``errors.Code``."""

    code: str
    text: str


class Fill(NamedTuple):
    """A copy of bytes from a client's region or a loan to ``offset`` of a segment of the front's arena, for
    an input of the request at ``position`` in its batch. ``elements`` is the number of elements.
    """

    position: int
    datatype: str
    elements: int
    segment: int
    offset: int
    source: Place | Loan | DeviceLoan


def payload(raw: Any) -> Payload:
    """Return a decoded payload field with its class restored; bytes stay bytes. Raise ``ValueError`` for an
    unknown kind.
    """
    if isinstance(raw, bytes):
        return raw
    if len(raw) == len(Parts._fields):
        return Parts(tuple([_simple(one) for one in raw[0]]))
    simple: Payload = _simple(raw)
    return simple


def _simple(raw: Any) -> Any:
    if isinstance(raw, bytes):
        return raw
    if len(raw) == len(Ref._fields):
        return Ref(*raw)
    if raw[3] not in _KINDS:
        raise ValueError(f"a payload of kind {raw[3]!r}")
    return _KINDS[raw[3]](*raw)


def tensors(raw: tuple[Any, ...]) -> tuple[WireTensor, ...]:
    return tuple(
        [
            WireTensor(name, datatype, shape, at if type(at) is bytes else payload(at))
            for name, datatype, shape, at in raw
        ]
    )


def requests(raw: Iterable[Any]) -> tuple[WireRequest, ...]:
    return tuple([plain_request(one) if isinstance(one, int) else WireRequest(*one) for one in raw])


def requests_as_tuples(raw: Iterable[Any]) -> list[WireRequest]:
    """Return a decoded field of requests, each as a tuple of all fields, with or without field names."""
    return [plain_request(one) if isinstance(one, int) else one for one in raw]


@functools.lru_cache(maxsize=1024)
def plain_request(rows: int) -> WireRequest:
    """Return a request with rows alone, cached: its parameters must not be changed."""
    return WireRequest(rows, {}, ())


def responses(raw: tuple[Any, ...]) -> tuple[tuple[WireTensor, ...] | WireFailure | None, ...]:
    """Return a decoded field of responses. A response whose first element is a string is a failure."""
    return tuple(None if one is None else _response(one) for one in raw)


def _response(raw: tuple[Any, ...]) -> tuple[WireTensor, ...] | WireFailure:
    return WireFailure(*raw) if len(raw) == 2 and isinstance(raw[0], str) else tensors(raw)
