"""Every message that a worker process sends or receives. All of them, and nothing else.

A message is a small named tuple. On the wire it is a msgpack array ``[TAG, *fields]`` in one
SOCK_SEQPACKET datagram (see ``link.py`` for datagrams that would be too large); file descriptors
ride beside it. Nothing here is pickled, no class name travels, and a tag that is not in the table
is an error of the peer.

Who says what::

    supervisor -> worker   Init, Stop                           (the boot socket)
    worker -> supervisor   Phase, Ready, LoadFailed, Unrecoverable, Log
    front -> worker        Attach, Segment, DropSegment, Run, Cancel, Credit, Free     (the link)
    worker -> front        Attached, Segment, DropSegment, Yield, Done, Failed, Released

A batch of a model that is not decoupled is answered by one ``Done`` or ``Failed``. A batch of a
decoupled model is answered by any number of ``Yield`` and then by one ``Done`` without outputs, or by
``Failed``.

The supervisor keeps a duplicate of the front's end of every link, so a front may die and be
replaced while the worker keeps its model. A new front opens with ``Attach``; whatever arrives on
the link before the worker's ``Attached`` of the same epoch was meant for the previous front and is
dropped.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

#: Raised whenever a field of a message changes meaning.
PROTOCOL: Final = 2

#: Tensors up to this many bytes a batch travel inside the message, not in an arena. Below it the
#: bookkeeping of an arena block costs more than copying the bytes through the socket.
INLINE_NBYTES: Final = 16 * 1024

#: So many ``Yield`` of one batch may be on their way to clients; then its worker waits for ``Credit``.
YIELD_WINDOW: Final = 64


class Ref(NamedTuple):
    """Where bytes lie in an arena of the sender: a segment, an offset in it, a length."""

    segment: int
    offset: int
    nbytes: int


#: The bytes of a tensor: themselves when small, a place in an arena otherwise.
Payload: TypeAlias = bytes | Ref


class WireTensor(NamedTuple):
    """One tensor of a whole batch. ``shape`` is complete, batch dimension included."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    payload: Payload


class WireRequest(NamedTuple):
    """What a batch knows of one of its requests besides its rows of the tensors."""

    rows: int
    parameters: dict[str, Any]
    requested_outputs: tuple[str, ...]


class WireFailure(NamedTuple):
    """Why one request, or a whole batch, has no outputs. ``code`` is a name of ``errors.Code``."""

    code: str
    text: str


# ---- supervisor -> worker -------------------------------------------------------------------


class Init(NamedTuple):
    """Load this callable and say ``Ready``.

    ``source`` is ``{"path": "linear.py:Linear", "base_dir": "/models", "kwargs": {…}}`` or
    ``{"pickle": b"…", "sys_path": […]}`` (cloudpickle, written by the ``bind()`` of the same user,
    never by a client; the paths are where that program finds its modules), or empty for a worker
    that is a thread and has its callable.
    Tensors are ``[name, datatype, shape, optional]``. ``concurrency`` 0: as the kind of the callable
    asks for. A warm-up is ``(name, batch size, count, inputs)``, with ``(name, datatype, shape, "zero",
    "random" or "file", path)`` for each input.
    """

    protocol: int
    model: str
    version: int
    instance: str
    device: str
    source: dict[str, Any]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    max_batch_size: int
    preferred_batch_sizes: tuple[int, ...]
    decoupled: bool
    concurrency: int
    strict: bool
    read_only_inputs: bool
    warmup: tuple[Any, ...]


class Stop(NamedTuple):
    """Finish the batch at hand and exit with status 0."""


# ---- worker -> supervisor -------------------------------------------------------------------


class Phase(NamedTuple):
    """What the worker does while it is not ready yet: "importing", "loading"."""

    name: str


class Ready(NamedTuple):
    """The callable is loaded; ``load_s`` seconds were spent on it. It takes ``slots`` batches at once."""

    load_s: float
    slots: int


class LoadFailed(NamedTuple):
    """The callable could not be loaded. ``text`` is one line, ``traceback`` is for the log."""

    text: str
    traceback: str


class Unrecoverable(NamedTuple):
    """The callable said that no further inference is possible. ``text`` is one line."""

    text: str


class Log(NamedTuple):
    """A log record of the worker's own. ``level`` is a ``logging`` number."""

    level: int
    text: str
    traceback: str


# ---- both directions of the link ------------------------------------------------------------


class Segment(NamedTuple):
    """The sender's arena has a new segment; its memfd rides beside this message."""

    segment: int
    nbytes: int


class DropSegment(NamedTuple):
    """The sender's arena gave a segment up; nothing will refer to it again."""

    segment: int


# ---- front -> worker ------------------------------------------------------------------------


class Attach(NamedTuple):
    """A front (a new one, where the epoch is new) takes the link over."""

    epoch: int


class Run(NamedTuple):
    """Call the inference callable on one batch. Every request shares the tensors' inner shapes."""

    batch_id: int
    requests: tuple[WireRequest, ...]
    inputs: tuple[WireTensor, ...]


class Cancel(NamedTuple):
    """Nobody waits any more for the answers to one request of a batch, told by its position."""

    batch_id: int
    position: int


class Credit(NamedTuple):
    """So many more ``Yield`` of a batch have gone to the clients, or were dropped."""

    batch_id: int
    yields: int


class Free(NamedTuple):
    """The front has read these blocks of the worker's output arena: (segment, offset) each."""

    blocks: tuple[tuple[int, int], ...]


# ---- worker -> front ------------------------------------------------------------------------


class Attached(NamedTuple):
    """The worker heard ``Attach``; what follows belongs to that epoch."""

    epoch: int


class Yield(NamedTuple):
    """One response for some or all requests of a batch of a decoupled model; more may follow.

    As in ``Done``; besides, None in ``responses`` is a request without a response this time, and a
    ``WireFailure`` is the last response of its request.
    """

    batch_id: int
    outputs: tuple[WireTensor, ...] | None
    responses: tuple[tuple[WireTensor, ...] | WireFailure | None, ...] | None


class Done(NamedTuple):
    """A batch ran.

    Exactly one of the two is given: ``outputs`` (one tensor for the whole batch, rows in the order
    of the requests; the front slices) or ``responses`` (a tuple of tensors, or a ``WireFailure``,
    for each request); neither at the end of a batch of a decoupled model. ``inputs_free`` says that
    nothing in the worker refers to the batch's input blocks any more; otherwise ``Released`` follows
    when that comes true.
    """

    batch_id: int
    outputs: tuple[WireTensor, ...] | None
    responses: tuple[tuple[WireTensor, ...] | WireFailure | None, ...] | None
    inputs_free: bool
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int


class Failed(NamedTuple):
    """The callable raised or answered nonsense: the whole batch fails with this."""

    batch_id: int
    failure: WireFailure
    inputs_free: bool


class Released(NamedTuple):
    """The last array over the inputs of these batches died after their ``Done``."""

    batch_ids: tuple[int, ...]


Message: TypeAlias = (
    Init
    | Stop
    | Phase
    | Ready
    | LoadFailed
    | Unrecoverable
    | Log
    | Segment
    | DropSegment
    | Attach
    | Run
    | Cancel
    | Credit
    | Free
    | Attached
    | Yield
    | Done
    | Failed
    | Released
)


class WireError(Exception):
    """The peer sent something that is no message of this protocol."""


class Vocabulary:
    """The messages of one channel: tag -> class. Encodes and decodes nothing else."""

    def __init__(self, classes: dict[int, Any]) -> None:
        self._classes = classes
        self._tags = {cls: tag for tag, cls in classes.items()}

    def encode(self, message: Any) -> bytes:
        """A message as the bytes of one datagram."""
        packed: bytes = msgpack.packb((self._tags[type(message)], *message))
        return packed

    def decode(self, data: bytes | memoryview) -> Any:
        """The message in a datagram.

        Nested tuples arrive as plain tuples; ``tensors()`` and its kin name their fields again.

        Raises:
            WireError: not msgpack, an unknown tag, or the wrong number of fields.
        """
        try:
            tag, *fields = msgpack.unpackb(data, use_list=False, strict_map_key=False)
            return self._classes[tag](*fields)
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            raise WireError(f"not a message of protocol {PROTOCOL}: {error}") from error


WORKER: Final = Vocabulary(
    {
        1: Init,
        2: Stop,
        10: Phase,
        11: Ready,
        12: LoadFailed,
        13: Log,
        14: Unrecoverable,
        20: Segment,
        21: DropSegment,
        30: Attach,
        31: Run,
        32: Free,
        33: Cancel,
        34: Credit,
        40: Attached,
        41: Done,
        42: Failed,
        43: Released,
        44: Yield,
    }
)


def encode(message: Message) -> bytes:
    """A message from or to a worker as the bytes of one datagram."""
    return WORKER.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """The message from or to a worker in a datagram; raises ``WireError``."""
    message: Message = WORKER.decode(data)
    return message


def payload(raw: Any) -> Payload:
    """A payload field as decoded: bytes stay, a triple becomes a ``Ref``."""
    return raw if isinstance(raw, bytes) else Ref(*raw)


def tensors(raw: tuple[Any, ...]) -> tuple[WireTensor, ...]:
    """A decoded field of tensors with its names back."""
    return tuple(WireTensor(name, datatype, shape, payload(at)) for name, datatype, shape, at in raw)


def requests(raw: tuple[Any, ...]) -> tuple[WireRequest, ...]:
    """A decoded field of requests with its names back."""
    return tuple(WireRequest(*fields) for fields in raw)


def responses(raw: tuple[Any, ...]) -> tuple[tuple[WireTensor, ...] | WireFailure | None, ...]:
    """A decoded field of responses: a failure is told by its first element being a string."""
    return tuple(None if one is None else _response(one) for one in raw)


def _response(raw: tuple[Any, ...]) -> tuple[WireTensor, ...] | WireFailure:
    return WireFailure(*raw) if len(raw) == 2 and isinstance(raw[0], str) else tensors(raw)
