"""Every message that a worker process sends or receives. What they say of tensors, requests and memory is in
``payloads.py``.

A message is a small named tuple. On the wire it is a msgpack array ``[TAG, *fields]`` in one
SOCK_SEQPACKET datagram (see ``datagram.py`` for those that would be too large); file descriptors
ride beside it. Nothing here is pickled, and a tag that is not in the table is an error of the peer.

Batches that are sent in one turn travel together, and so do answers that may wait: the datagram is
an array of messages then. Messages about memory come by themselves.

Who says what::

    supervisor -> worker   Init, Stop                           (the boot socket)
    worker -> supervisor   Phase, Ready, LoadFailed, Unrecoverable, Log, Imported
    front -> worker        Attach, Segment, DropSegment, Run, Cancel, Credit, Free, Shrink   (the link)
                           Region, CudaRegion, DropRegion, Lend, Unlend, Answer
                           StartExports, FreeExports, LendExport, UnlendExport
    worker -> front        Attached, Segment, DropSegment, Yield, Computed, Split, Done, Failed
                           Released, RegionOpened, Call, CallOff, Return, ExportSegment, ExportOpened
                           Metrics, Command

A batch is answered by one ``Done`` or ``Failed``; that of a decoupled model by any number of ``Yield`` and
then by one ``Done`` without outputs, or by ``Failed``.

The supervisor keeps a duplicate of the front's end of every link, so a front may die and be
replaced while the worker keeps its model. A new front opens with ``Attach``; whatever arrives on
the link before the worker's ``Attached`` of the same epoch was meant for the previous front and is
dropped.
"""

# Without postponed annotations: ``NamedTuple`` compiles each that is text, which here and in ``payloads.py``
# is a fiftieth of a worker's start.
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve_worker.protocol.metrics import MetricChange
from gpuserve_worker.protocol.payloads import (
    INLINE_NBYTES,
    DeviceLoan,
    Exported,
    Fill,
    Loan,
    Parts,
    Payload,
    Place,
    Ref,
    WireFailure,
    WireRequest,
    WireTensor,
    payload,
    requests,
    responses,
    tensors,
)
from gpuserve_worker.protocol.vocabulary import Vocabulary, WireError

__all__ = ["INLINE_NBYTES", "DeviceLoan", "Exported", "Fill", "Loan", "Parts", "Payload", "Place", "Ref"]
__all__ += ["Vocabulary", "WireError", "WireFailure", "WireRequest", "WireTensor"]
__all__ += ["payload", "requests", "responses", "tensors"]

#: Raised whenever a field of a message changes meaning, or a worker must know another message.
PROTOCOL: Final = 11

#: So many ``Yield`` of one batch may be on their way to clients; then its worker waits for ``Credit``. The
#: first travels alone: the front has let it out when it gives credit for the rest of the window.
YIELD_WINDOW: Final = 64


class Init(NamedTuple):
    """Load this callable and say ``Ready``. ``source`` is ``{"path": "linear.py:Linear", "base_dir":
    "/models", "kwargs": {…}}`` or ``{"pickle": b"…", "sys_path": […]}`` (cloudpickle, written by the
    ``bind()`` of the same user, never by a client; the paths are where that program finds its modules), or
    empty for a worker that is a thread and has its callable. Tensors are ``[name, datatype, shape, optional,
    memory]``. ``concurrency`` 0: as the kind of the callable asks for. What ``strict`` and ``exact`` say of
    outputs: ``calling/outputs.py``. ``all_lines``: clients are told every line of what the callable raised. A
    warm-up is ``(name, batch size, count, inputs)``, with ``(name, datatype, shape, "zero", "random" or
    "file", path)`` for each input. ``device`` is "cpu", or "cuda:0" in a process that sees one GPU. ``array``
    is the kind of array that inputs come as: "numpy", "cupy" or "torch". The worker keeps to ``cpus`` (all,
    where empty) and takes its memory from ``numa_node`` (-1: from any). Of what clients lend it of the host's
    memory it may page-lock ``lent_limit_nbytes``. ``tells_imports``: it says which files it
    has ``Imported``.
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
    exact: bool
    read_only_inputs: bool
    warmup: tuple[Any, ...]
    array: str = "numpy"
    cpus: tuple[int, ...] = ()
    numa_node: int = -1
    lent_limit_nbytes: int = 0
    all_lines: bool = False
    tells_imports: bool = False


class Stop(NamedTuple):
    """Finish the batch at hand and exit with status 0."""


class Phase(NamedTuple):
    """The worker's state while it is not ready yet: "importing", "loading"."""

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
    """A log record of the worker's own. ``level`` is a ``logging`` number, ``request_ids`` of what ran."""

    level: int
    text: str
    traceback: str
    request_ids: tuple[str, ...] = ()


class Imported(NamedTuple):
    """The files of the user's that this worker has imported so far: its callable's, and what that imports. A
    load that failed comes with those that it came through.
    """

    files: tuple[str, ...]


class Attach(NamedTuple):
    """A front (a new one, where the epoch is new) takes the link over."""

    epoch: int


class Run(NamedTuple):
    """Call the inference callable on one batch. Every request shares the tensors' inner shapes. ``fills``
    come before the call: the front touches no byte of a client's region. The ``Place`` of an input is read
    where it is, which only a model with read-only inputs is asked to do. ``dropped`` sequences have ended
    since the last batch, without their last request. ``may_wait``: its answer may leave together with that of
    the next one, which has begun by then. ``request_ids`` are there where lines of the log are to name them.
    """

    batch_id: int
    requests: tuple[WireRequest | int, ...]
    inputs: tuple[WireTensor, ...]
    fills: tuple[Fill, ...] = ()
    dropped: tuple[int | str, ...] = ()
    may_wait: bool = False
    request_ids: tuple[str, ...] = ()


class Cancel(NamedTuple):
    """Nobody waits any more for the answers to one request of a batch, told by its position."""

    batch_id: int
    position: int


class Credit(NamedTuple):
    """The front has sent, or dropped, so many more ``Yield`` of a batch."""

    batch_id: int
    yields: int


class Answer(NamedTuple):
    """What became of a ``Call``: its response, or its failure; ``final`` says that no more will come. The end
    of a stream is an answer without outputs (None) and without a failure. The memory of every ``Loan`` in it
    is this worker's until it says ``Return`` with the number ``lease``, where that is not 0.
    """

    call_id: int
    lease: int
    outputs: tuple[WireTensor, ...] | None
    parameters: dict[str, Any]
    failure: WireFailure | None
    final: bool


class Attached(NamedTuple):
    """The worker obeyed ``Attach``; what follows belongs to that epoch."""

    epoch: int


class Call(NamedTuple):
    """The callable asks another model of this server. Inputs lie in this message or in the worker's arena,
    whose blocks come back by ``Free`` as those of outputs do. ``timeout_s`` 0 is no limit. ``sequence`` is
    its id, and whether it starts and ends. ``stream``: any number of responses may come. ``waits``: the
    worker runs nothing else before it is answered.
    """

    call_id: int
    model: str
    version: str
    inputs: tuple[WireTensor, ...]
    requested_outputs: tuple[str, ...]
    parameters: dict[str, Any]
    timeout_s: float
    stream: bool
    waits: bool
    request_id: str = ""
    sequence: tuple[int | str, bool, bool] | None = None


class Command(NamedTuple):
    """The callable asks for a model to be loaded ("load") or unloaded ("unload"), or whether it is "ready".
    What becomes of it is told by an ``Answer`` without outputs.
    """

    call_id: int
    verb: str
    model: str
    parameters: dict[str, Any]


class CallOff(NamedTuple):
    """Nobody waits for the answer to a call any more. If none was sent, an empty one is, as an echo."""

    call_id: int


class Metrics(NamedTuple):
    """What became of the callable's own metrics since this front was last told; ``MetricChange`` for each."""

    changes: tuple[MetricChange, ...]


class Yield(NamedTuple):
    """One response for some or all requests of a batch of a decoupled model; more may follow. As in ``Done``;
    besides, None in ``responses`` is a request without a response this time, and a ``WireFailure`` is the
    last response of its request. ``parameters`` are those that the callable gave each response, or empty
    where it gave none. ``last`` are the requests that have ended, by their positions: their response here, if
    any, was the last one.
    """

    batch_id: int
    outputs: tuple[WireTensor, ...] | None
    responses: tuple[tuple[WireTensor, ...] | WireFailure | None, ...] | None
    parameters: tuple[dict[str, Any], ...] = ()
    last: tuple[int, ...] = ()


class Computed(NamedTuple):
    """The work of these batches is done, and only the copies of their outputs from the device are under way:
    they hold nothing back. Each is answered by its ``Done`` or ``Failed`` as ever.
    """

    batch_ids: tuple[int, ...]


class Split(NamedTuple):
    """The memory of the device did not suffice for a batch, which is run again in two halves."""

    batch_id: int


class Done(NamedTuple):
    """A batch ran. Exactly one of the two is given: ``outputs`` (one tensor for the whole batch, rows in the
    order of the requests; the front slices) or ``responses`` (a tuple of tensors, or a ``WireFailure``, for
    each request); neither at the end of a batch of a decoupled model. ``inputs_free`` says that nothing in
    the worker refers to the batch's input blocks any more; otherwise ``Released`` follows when that comes
    true.
    """

    batch_id: int
    outputs: tuple[WireTensor, ...] | None
    responses: tuple[tuple[WireTensor, ...] | WireFailure | None, ...] | None
    inputs_free: bool
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int
    parameters: tuple[dict[str, Any], ...] = ()


class Failed(NamedTuple):
    """The callable raised or answered nonsense: the whole batch fails with this."""

    batch_id: int
    failure: WireFailure
    inputs_free: bool


# Memory is made known between the processes, and given back: segments of arenas, clients' regions, loans
# between workers, exports of a device's memory.


class Segment(NamedTuple):
    """The sender's arena has a new segment; its memfd rides beside this message."""

    segment: int
    nbytes: int


class DropSegment(NamedTuple):
    """The sender's arena gave a segment up; nothing will refer to it again."""

    segment: int


class Region(NamedTuple):
    """A client's region of system shared memory; its file rides beside this. The region is ``nbytes`` from
    ``offset`` of the file on; places in it count from there. The file is the client's: it may be written or
    shrunk at any time.
    """

    region: int
    offset: int
    nbytes: int


class CudaRegion(NamedTuple):
    """A client's region of device memory, as a ``cudaIpcMemHandle_t`` of 64 bytes. See ``RegionOpened``."""

    region: int
    device_id: int
    nbytes: int
    raw_handle: bytes


class DropRegion(NamedTuple):
    """No batch will name this client's region any more."""

    region: int


class Lend(NamedTuple):
    """A segment of another worker's arena, by a number of the front's; its memfd rides beside it."""

    segment: int
    nbytes: int


class Unlend(NamedTuple):
    """No batch will name this lent segment any more."""

    segment: int


class Free(NamedTuple):
    """The front has read these blocks of the worker's output arena: (segment, offset) each."""

    blocks: tuple[tuple[int, int], ...]


class Shrink(NamedTuple):
    """Said every few seconds to a worker with a large output arena: give up what nothing has used since."""


class StartExports(NamedTuple):
    """Outputs are to be kept on the device for other workers; one that cannot says nothing."""


class ExportSegment(NamedTuple):
    """The sender has memory of its device for outputs that other workers read, and all of this may be seen by
    them: ``handle`` is its ``cudaIpcMemHandle_t``. It is not given up while the sender lives.
    """

    segment: int
    nbytes: int
    handle: bytes


class FreeExports(NamedTuple):
    """Nobody reads these blocks of the worker's exports any more: (segment, offset) each."""

    blocks: tuple[tuple[int, int], ...]


class LendExport(NamedTuple):
    """An ``ExportSegment`` of another worker, by a number of the front's. See ``ExportOpened``."""

    segment: int
    nbytes: int
    handle: bytes


class ExportOpened(NamedTuple):
    """What a ``LendExport`` lent can be read; or why it cannot, in one sentence."""

    segment: int
    problem: str


class UnlendExport(NamedTuple):
    """No batch will name what this ``LendExport`` lent any more."""

    segment: int


class RegionOpened(NamedTuple):
    """A ``CudaRegion`` can be used; or why it cannot, in one sentence."""

    region: int
    problem: str


class Return(NamedTuple):
    """The last array over what these answers lent has died; an answer of a stream is taken as well."""

    leases: tuple[int, ...]


class Released(NamedTuple):
    """The last array over the inputs of these batches died after their ``Done``."""

    batch_ids: tuple[int, ...]


Message: TypeAlias = (
    Init | Stop | Phase | Ready | LoadFailed | Unrecoverable | Log | Segment | DropSegment | Attach |
    Run | Cancel | Credit | Free | Shrink | Region | CudaRegion | DropRegion | Lend | Unlend | Answer
    | Attached | Yield | Computed | Split | Done | Failed | Released | RegionOpened | Call | CallOff
    | Return | Metrics | Command | StartExports | ExportSegment | FreeExports | LendExport | ExportOpened
    | UnlendExport | Imported
)  # fmt: skip


WORKER: Final = Vocabulary(
    {
        1: Init,
        2: Stop,
        10: Phase,
        11: Ready,
        12: LoadFailed,
        13: Log,
        14: Unrecoverable,
        15: Imported,
        20: Segment,
        21: DropSegment,
        30: Attach,
        31: Run,
        32: Free,
        33: Cancel,
        34: Credit,
        35: Region,
        36: CudaRegion,
        37: DropRegion,
        38: Lend,
        39: Unlend,
        40: Attached,
        41: Done,
        42: Failed,
        43: Released,
        44: Yield,
        45: RegionOpened,
        46: Computed,
        47: Split,
        48: Shrink,
        50: Call,
        51: CallOff,
        52: Answer,
        53: Return,
        54: Metrics,
        55: Command,
        60: StartExports,
        61: ExportSegment,
        62: FreeExports,
        63: LendExport,
        64: ExportOpened,
        65: UnlendExport,
    }
)
