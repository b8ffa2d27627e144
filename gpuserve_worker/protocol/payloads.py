"""What the messages between front and worker say of tensors, requests and memory, and how it is read back.
Pure, as ``wire.py``, which holds the messages themselves.

Memory is referred to by numbers that its sender gave out: a segment of an arena of the sender (``Ref``), a
region that a client registered (``Place``), a segment of another worker's arena that the front lends
(``Loan``), and what stays on a device (``Exported`` by its worker, lent as a ``DeviceLoan``).
"""

import functools
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeAlias

#: Tensors up to this many bytes a batch travel inside the message, not in an arena. Below it the
#: bookkeeping of an arena block costs more than copying the bytes through the socket.
INLINE_NBYTES: Final = 16 * 1024


#: What tells a place in a region, and one in a loan, from other numbers.
REGION: Final = "region"
LOAN: Final = "loan"
PARTS: Final = "parts"
EXPORTED: Final = "exported"
DEVICE_LOAN: Final = "device loan"


class Ref(NamedTuple):
    """Where bytes lie in an arena of the sender: a segment, an offset in it, a length."""

    segment: int
    offset: int
    nbytes: int


class Place(NamedTuple):
    """Where bytes lie in a client's region; ``kind`` tells a place from other triples of numbers."""

    region: int
    offset: int
    nbytes: int
    kind: str = REGION


class Loan(NamedTuple):
    """Where bytes lie in a segment of another worker's arena, by the number it was lent under."""

    segment: int
    offset: int
    nbytes: int
    kind: str = LOAN


class Exported(NamedTuple):
    """Where an output lies in the sender's exports, on its device; it is complete by now."""

    segment: int
    offset: int
    nbytes: int
    kind: str = EXPORTED


class DeviceLoan(NamedTuple):
    """Where bytes lie in the exports of another worker, by the number they were lent under. ``in_place``: the
    callable may be given these very bytes, which are on its own device.
    """

    segment: int
    offset: int
    nbytes: int
    kind: str = DEVICE_LOAN
    in_place: bool = False


class Parts(NamedTuple):
    """The rows of a batch that nobody has joined: the payload of each request, in their order. Only for an
    input that goes to a device: the copy there joins them.
    """

    parts: tuple[bytes | Ref | Place | Loan | DeviceLoan, ...]
    kind: str = PARTS


_KINDS: Final[dict[str, Any]] = {REGION: Place, LOAN: Loan, DEVICE_LOAN: DeviceLoan, EXPORTED: Exported}
#: The bytes of a tensor: themselves when small, a place in some memory otherwise.
Payload: TypeAlias = bytes | Ref | Place | Loan | Parts | Exported | DeviceLoan


class WireTensor(NamedTuple):
    """One tensor of a whole batch. ``shape`` is complete, batch dimension included."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    payload: Payload


class Sequence(NamedTuple):
    """Which sequence a request belongs to: its correlation id, and whether it is its first, its last."""

    id: int | str
    start: bool
    end: bool


class RequestDetails(NamedTuple):
    """What a client said of its request besides what it asks: its ``id`` ("": none), its ``priority`` (0:
    that of the model) and its time limit (0: none).
    """

    id: str = ""
    priority: int = 0
    timeout_s: float = 0.0


class WireRequest(NamedTuple):
    """What a batch knows of one of its requests besides its rows of the tensors. One without parameters, and
    of which nothing else is said, travels as the number of its rows. ``placements`` are the outputs that are
    to be written into a client's region, by name: a response then has them with a ``Place`` of as many bytes
    as were written. ``sequence`` is (id, start, end) of a request that belongs to a sequence. ``kept`` are
    the outputs that other workers read, and may stay on the device. ``details`` are ``RequestDetails``, for
    models that want them.
    """

    rows: int
    parameters: dict[str, Any]
    requested_outputs: tuple[str, ...]
    placements: tuple[tuple[str, Place], ...] = ()
    sequence: tuple[int | str, bool, bool] | None = None
    kept: tuple[str, ...] = ()
    details: tuple[str, int, float] | None = None


class WireFailure(NamedTuple):
    """Why one request, or a whole batch, has no outputs. ``code`` is a name of ``errors.Code``."""

    code: str
    text: str


class Fill(NamedTuple):
    """Copy bytes of a client's region, or of a loan, to ``offset`` of a segment of the front's arena, for an
    input of the request at ``position`` in its batch. ``elements`` is how many they are.
    """

    position: int
    datatype: str
    elements: int
    segment: int
    offset: int
    source: Place | Loan | DeviceLoan


def payload(raw: Any) -> Payload:
    """A payload field as decoded: bytes stay, numbers get their name back; ``ValueError``: no such kind."""
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
    """A decoded field of requests, each as a tuple of all fields, with or without their names."""
    return [plain_request(one) if isinstance(one, int) else one for one in raw]


@functools.lru_cache(maxsize=1024)
def plain_request(rows: int) -> WireRequest:
    """A request of which there is nothing to say but its rows; its parameters are nobody's to change."""
    return WireRequest(rows, {}, ())


def responses(raw: tuple[Any, ...]) -> tuple[tuple[WireTensor, ...] | WireFailure | None, ...]:
    """A decoded field of responses: a failure is told by its first element being a string."""
    return tuple(None if one is None else _response(one) for one in raw)


def _response(raw: tuple[Any, ...]) -> tuple[WireTensor, ...] | WireFailure:
    return WireFailure(*raw) if len(raw) == 2 and isinstance(raw[0], str) else tensors(raw)
