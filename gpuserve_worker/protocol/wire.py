"""The messages that a worker process sends or receives. ``payloads.py`` has their parts that describe
tensors, requests and memory.

A message is a small named tuple. On the wire it is a msgpack array ``[TAG, *fields]`` in one
SOCK_SEQPACKET datagram (``datagram.py`` handles messages that are too large); file descriptors are
sent beside the message. Nothing is pickled, and an unknown tag is an error of the peer.

Batches that the front sends in one iteration of its event loop share a datagram, and so do replies that
may wait. The datagram is then an array of messages. A message with a descriptor has a datagram of its own.

Senders and receivers::

    supervisor -> worker   Init, Stop, Sleep, Wake              (the boot socket)
    worker -> supervisor   Phase, Ready, Slept, LoadFailed, Unrecoverable, Ending, Log, Imported
    front -> worker        Attach, Segment, DropSegment, Run, Cancel, Credit, Free, Shrink   (the link)
                           Region, CudaRegion, DropRegion, Lend, Unlend, Answer
                           StartExports, FreeExports, LendExport, UnlendExport
    worker -> front        Attached, Segment, DropSegment, Yield, Stepped, Computed, Split, Done, Failed
                           Requeue
                           Released, RegionOpened, Call, CancelCall, Return, ExportSegment, ExportOpened
                           Metrics, DeviceMemory, Command

The reply to a batch is one ``Done`` or ``Failed``. The reply of a decoupled model is any number of ``Yield``,
then one ``Done`` without outputs, or ``Failed``. A stepped callable sends the responses of many batches in
one ``Stepped``, and returns a batch that it cannot run now by ``Requeue``.

The supervisor keeps a duplicate of the front's end of every link, so a front may die and be
replaced while the worker keeps its model. A new front sends ``Attach`` first. It drops messages that
arrive before the worker's ``Attached`` of the same epoch, because the previous front was their receiver.
"""

# Annotations are not postponed: ``NamedTuple`` compiles each annotation that is text, which for this file and
# ``payloads.py`` is a fiftieth of a worker's start time.
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve_worker.protocol.datagram import MessageCodec, WireError
from gpuserve_worker.protocol.metric_changes import MetricChange
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

__all__ = ["INLINE_NBYTES", "DeviceLoan", "Exported", "Fill", "Loan", "Parts", "Payload", "Place", "Ref"]
__all__ += ["MessageCodec", "WireError", "WireFailure", "WireRequest", "WireTensor"]
__all__ += ["payload", "requests", "responses", "tensors"]

#: Protocol version: incremented when a field changes its meaning or a worker must support a new message.
PROTOCOL: Final = 15

#: Limit of ``Yield`` messages of one batch that clients have not received; then the worker waits for
#: ``Credit``. The window starts at one: the front gives credit for the rest when it has sent the first
#: response.
YIELD_WINDOW: Final = 64


class Init(NamedTuple):
    """Load this callable, then reply ``Ready``.

    ``source`` is ``{"path": "linear.py:Linear", "base_dir": "/models", "kwargs": {…}}``, or ``{"pickle":
    b"…", "sys_path": […]}`` (cloudpickle, written by ``bind()`` of the same user, never by a client; the
    paths are the module paths of that program), or empty for a worker thread, which has its callable. A large
    pickle is in sealed memory, whose descriptor is sent beside this message: ``ranges`` in the place of
    ``pickle`` has the offset and length of the pickle and of each of its buffers.

    Tensors are ``[name, datatype, shape, optional, memory]``. ``concurrency`` 0 means the default of the
    callable's kind. ``inference/outputs.py`` documents ``strict`` and ``exact``. If ``all_lines``, clients
    receive every line of the callable's exceptions.

    A warm-up is ``(name, batch size, count, inputs)``, with ``(name, datatype, shape, "zero", "random" or
    "file", path)`` for each input. ``device`` is "cpu", or "cuda:0" in a process that sees one GPU. ``array``
    is the kind of input arrays: "numpy", "cupy" or "torch". The worker runs on ``cpus`` (empty: all) and
    allocates memory from ``numa_node`` (-1: any). It may page-lock ``lent_limit_nbytes`` of the host memory
    that clients registered, and ``locked_limit_nbytes`` in all (0: no limit). If ``reports_imports``, the
    worker reports its imported files by ``Imported``.
    ``max_active`` is the number of active requests of a stepped callable, 0 for other callables.
    ``gpu_memory_nbytes`` is the limit of the memory that the worker allocates on each of its GPUs, 0: none.
    ``rank`` is the number of the worker among the ``ranks`` processes of its instance (``ranks.py``). If
    ``may_sleep``, the model is loaded on demand.
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
    reports_imports: bool = False
    owned_outputs: bool = False
    static_inputs: bool = False
    max_active: int = 0
    gpu_memory_nbytes: int = 0
    rank: int = 0
    ranks: int = 1
    locked_limit_nbytes: int = 0
    may_sleep: bool = False


class Stop(NamedTuple):
    """Finish the running batch and exit with status 0."""


class Sleep(NamedTuple):
    """Call ``sleep`` of the callable, whose batches have all ended, free unused memory, and reply ``Slept``.
    If ``sleep`` or ``wake`` raises, the process ends.
    """


class Wake(NamedTuple):
    """Call ``wake`` of the callable, then reply ``Ready``."""


class Slept(NamedTuple):
    """The callable sleeps."""


class Phase(NamedTuple):
    """The phase of a worker that is not ready yet: "importing", "loading", "warming up"."""

    name: str


class Ready(NamedTuple):
    """The callable is loaded or awake, after ``load_s`` seconds. The worker accepts ``slots`` concurrent
    batches. ``can_sleep``: the callable has the methods ``sleep`` and ``wake``, or has none of them and
    copies of shared weights on its device. ``moves_to_host``: asleep, it takes memory of the host for what it
    frees on its device.
    """

    load_s: float
    slots: int
    can_sleep: bool = False
    moves_to_host: bool = True


class LoadFailed(NamedTuple):
    """The callable could not be loaded. ``text`` is one line; ``traceback`` is for the log."""

    text: str
    traceback: str


class Unrecoverable(NamedTuple):
    """The callable raised ``UnrecoverableError``: it can run no further inference. ``text`` is one line."""

    text: str


class Ending(NamedTuple):
    """The worker is about to exit, because of ``text``, which is one line."""

    text: str


class Log(NamedTuple):
    """A worker's log record: ``level`` of ``logging``, ``request_ids`` of the running batch."""

    level: int
    text: str
    traceback: str
    request_ids: tuple[str, ...] = ()


class Imported(NamedTuple):
    """The user's files that this worker has imported so far: the file of its callable and that file's
    imports. After a failed load, the files in the traceback are included.
    """

    files: tuple[str, ...]


class WantWeights(NamedTuple):
    """The worker asks for shared weights. The reply is ``LoadWeights``, or ``Weights`` when they are loaded.
    ``key`` is the name of the weights, and what distinguishes their versions.
    """

    key: str


class LoadWeights(NamedTuple):
    """The worker is to load these weights, and to reply with ``Weights`` or ``WeightsFailed``."""

    key: str


class Weights(NamedTuple):
    """Weights in sealed memory, whose memfd is sent beside this message, from the worker that loaded them or
    to a worker. ``ranges`` are those of ``Init``. If the tensors are on a device, ``device`` is its UUID, and
    a second descriptor is that of ``device_nbytes`` of its memory.
    """

    key: str
    ranges: tuple[tuple[int, int], ...]
    device: str = ""
    device_nbytes: int = 0


class WeightsFailed(NamedTuple):
    """The worker could not load these weights."""

    key: str


class ReleaseWeights(NamedTuple):
    """The worker has unmapped the memory of these weights on a device, because its model goes to sleep."""

    key: str


class Attach(NamedTuple):
    """A front takes over the link. The epoch of a new front is new."""

    epoch: int


class Run(NamedTuple):
    """Call the inference callable on one batch. All requests share the inner shapes of the tensors.

    The worker executes ``fills`` before the call, because the front accesses no byte of a client's region. An
    input ``Place`` is read in place, which the front requests only of models with read-only inputs.
    ``dropped`` are the sequences that have ended since the last batch without their last request. If
    ``may_wait``, the reply may be sent together with the reply of the next batch, which has started by then.
    ``request_ids`` are present if log lines are to name them, or if a request is traced: then ``traces`` has
    the trace context of each request, () for one that is not traced.
    """

    batch_id: int
    requests: tuple[WireRequest | int, ...]
    inputs: tuple[WireTensor, ...]
    fills: tuple[Fill, ...] = ()
    dropped: tuple[int | str, ...] = ()
    may_wait: bool = False
    request_ids: tuple[str, ...] = ()
    traces: tuple[tuple[str, ...], ...] = ()


class Cancel(NamedTuple):
    """The client of one request of a batch, given by its position, is gone."""

    batch_id: int
    position: int


class Credit(NamedTuple):
    """The front has sent or dropped responses: the number of each batch, with the number of its ``Yield``
    messages or of its responses in ``Stepped``.
    """

    grants: tuple[tuple[int, int], ...]


class Answer(NamedTuple):
    """A response or the failure of a ``Call``. ``final`` marks the last response. The end of a stream is an
    answer without outputs (None) and without a failure. The worker may use the memory of every ``Loan`` in
    the answer until it sends ``Return`` with the number ``lease``, unless that is 0.
    """

    call_id: int
    lease: int
    outputs: tuple[WireTensor, ...] | None
    parameters: dict[str, Any]
    failure: WireFailure | None
    final: bool


class Attached(NamedTuple):
    """The worker has processed ``Attach``; its later messages belong to that epoch."""

    epoch: int


class Call(NamedTuple):
    """The callable calls another model of this server. Inputs are in this message or in the worker's arena,
    whose blocks the front frees by ``Free``, as those of outputs. ``timeout_s`` 0 means no limit.
    ``sequence`` is the id, and whether the sequence starts and ends. If ``stream``, any number of responses
    may come. If ``waits``, the worker runs nothing else before the answer.
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
    """A callable's command: "load" or "unload" a model, or is it "ready"? The reply: an ``Answer``."""

    call_id: int
    verb: str
    model: str
    parameters: dict[str, Any]


class CancelCall(NamedTuple):
    """No caller waits for an answer any more; if none was sent yet, the front sends an empty one."""

    call_id: int


class Metrics(NamedTuple):
    """Changes of the callable's metrics since the last message, one ``MetricChange`` each."""

    changes: tuple[MetricChange, ...]


class DeviceMemory(NamedTuple):
    """The bytes that the worker holds on its device, as its allocators know them, and the bytes of host
    memory that the worker has page-locked.
    """

    nbytes: int
    locked_nbytes: int = 0


class Yield(NamedTuple):
    """One response for some or all requests of a batch of a decoupled model; more may follow.

    The fields are those of ``Done``. In addition, None in ``responses`` is a request without a response this
    time, and a ``WireFailure`` is the last response of its request. ``parameters`` has the parameters of each
    response, or is empty if the callable set none. ``last`` has the positions of the requests that have ended
    with this message.
    """

    batch_id: int
    outputs: tuple[WireTensor, ...] | None
    responses: tuple[tuple[WireTensor, ...] | WireFailure | None, ...] | None
    parameters: tuple[dict[str, Any], ...] = ()
    last: tuple[int, ...] = ()


class Stepped(NamedTuple):
    """Steps of a stepped callable since the last message, with the responses of the last step.

    ``steps`` is the number of the steps and ``busy_ns`` their time; ``active`` requests were in the last one.
    Each of ``batch_ids`` is a batch of one request with one response. ``outputs`` has the responses stacked
    on a new first axis; otherwise ``responses`` has one for each. All bytes are in the message. ``last`` has
    the positions of the requests that have ended; their ``Done`` follows. ``parameters`` are those of each
    response, or empty.
    """

    steps: int
    busy_ns: int
    active: int
    batch_ids: tuple[int, ...] = ()
    outputs: tuple[WireTensor, ...] | None = None
    responses: tuple[tuple[WireTensor, ...] | WireFailure | None, ...] | None = None
    parameters: tuple[dict[str, Any], ...] = ()
    last: tuple[int, ...] = ()


class Requeue(NamedTuple):
    """The worker returns a batch that has sent no response. Without a ``failure`` the batch was not begun,
    because the callable has no room for its request; the instance takes no other batch before one has ended.
    With a ``failure``, the callable raised while it computed several batches, and this batch may run once
    more, alone; otherwise it fails.
    """

    batch_id: int
    failure: WireFailure | None
    inputs_free: bool


class Computed(NamedTuple):
    """The computation of these batches is done and only the copies of their outputs from the device are
    running, so their slots are free. The reply to each follows as ``Done`` or ``Failed``.
    """

    batch_ids: tuple[int, ...]


class Split(NamedTuple):
    """The device memory was too small for a batch, which the worker runs again in two halves."""

    batch_id: int


class Done(NamedTuple):
    """A batch has run. Exactly one of two fields is given: ``outputs`` (one tensor for the whole batch, rows
    in request order, which the front slices) or ``responses`` (a tuple of tensors or a ``WireFailure`` for
    each request). Both are None at the end of a batch of a decoupled model. ``inputs_free`` says that nothing
    in the worker refers to the batch's input blocks; otherwise ``Released`` follows.
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
    """The callable raised, or returned invalid outputs: the whole batch fails."""

    batch_id: int
    failure: WireFailure
    inputs_free: bool


#: The final reply of a batch.
BatchReply: TypeAlias = Done | Failed | Requeue


class Agreed(NamedTuple):
    """Rank 0 tells the other ranks of its instance that the call of a batch raised in every rank."""

    batch_id: int


# Messages about shared memory: segments of arenas, clients' regions, loans between workers, exports of device
# memory.


class Segment(NamedTuple):
    """The sender's arena has a new segment. Its memfd is sent beside this message."""

    segment: int
    nbytes: int


class DropSegment(NamedTuple):
    """The sender's arena has closed a segment. No later message refers to the segment."""

    segment: int


class Region(NamedTuple):
    """A client's region of system shared memory. Its file descriptor is sent beside this message. The region
    is ``nbytes`` from ``offset`` of the file; places count from there. The client owns the file and may write
    to it or shrink it at any time.
    """

    region: int
    offset: int
    nbytes: int


class CudaRegion(NamedTuple):
    """A client's region of device memory: a ``cudaIpcMemHandle_t``. The reply is ``RegionOpened``."""

    region: int
    device_id: int
    nbytes: int
    raw_handle: bytes


class DropRegion(NamedTuple):
    """No later batch refers to this client's region."""

    region: int


class Lend(NamedTuple):
    """A segment of another worker's arena, under a front's number; its memfd is beside this message."""

    segment: int
    nbytes: int


class Unlend(NamedTuple):
    """No later batch refers to this lent segment."""

    segment: int


class Free(NamedTuple):
    """The front has read these blocks of the worker's output arena: (segment, offset) each."""

    blocks: tuple[tuple[int, int], ...]


class Shrink(NamedTuple):
    """Free memory for outputs, and for inputs on a device, that was not needed since the last ``Shrink``,
    which the front sends every few seconds.
    """


class StartExports(NamedTuple):
    """Keep outputs for other workers on the device. A worker that cannot do so does not reply."""


class ExportSegment(NamedTuple):
    """The sender has allocated device memory for outputs that other workers read. ``handle`` is the
    ``cudaIpcMemHandle_t`` of the whole allocation. The memory is not freed while the sender lives.
    """

    segment: int
    nbytes: int
    handle: bytes


class FreeExports(NamedTuple):
    """No worker reads these blocks of the worker's exports any more: (segment, offset) each."""

    blocks: tuple[tuple[int, int], ...]


class LendExport(NamedTuple):
    """Another worker's ``ExportSegment``, under a front's number. The reply is ``ExportOpened``."""

    segment: int
    nbytes: int
    handle: bytes


class ExportOpened(NamedTuple):
    """A ``LendExport`` can be read, or ``problem`` is a sentence with the reason why not."""

    segment: int
    problem: str


class UnlendExport(NamedTuple):
    """No later batch refers to the memory of this ``LendExport``."""

    segment: int


class RegionOpened(NamedTuple):
    """A ``CudaRegion`` can be used, or ``problem`` gives the reason why not, in one sentence."""

    region: int
    problem: str


class Return(NamedTuple):
    """The last array over these leases' memory is deleted; also acknowledges a stream's answer."""

    leases: tuple[int, ...]


class Released(NamedTuple):
    """The last arrays over the inputs of these batches were deleted after their ``Done``."""

    batch_ids: tuple[int, ...]


Message: TypeAlias = (
    Init | Stop | Sleep | Wake | Slept | Phase | Ready | LoadFailed | Unrecoverable | Log | Segment
    | DropSegment | Attach | Run | Cancel | Credit | Free | Shrink | Region | CudaRegion | DropRegion
    | Lend | Unlend | Answer
    | Attached | Yield | Computed | Split | Done | Failed | Released | RegionOpened | Call | CancelCall
    | Return | Metrics | Command | StartExports | ExportSegment | FreeExports | LendExport | ExportOpened
    | UnlendExport | DeviceMemory | Imported | WantWeights | LoadWeights | Weights | WeightsFailed | Stepped
    | Requeue | Ending | Agreed | ReleaseWeights
)  # fmt: skip


WORKER: Final = MessageCodec({
    1: Init, 2: Stop, 3: Sleep, 4: Wake, 5: Slept,
    10: Phase, 11: Ready, 12: LoadFailed, 13: Log, 14: Unrecoverable, 15: Imported, 16: WantWeights,
    17: LoadWeights, 18: Weights, 19: WeightsFailed, 22: Ending, 23: ReleaseWeights,
    20: Segment, 21: DropSegment,
    30: Attach, 31: Run, 32: Free, 33: Cancel, 34: Credit, 35: Region, 36: CudaRegion, 37: DropRegion,
    38: Lend, 39: Unlend,
    40: Attached, 41: Done, 42: Failed, 43: Released, 44: Yield, 45: RegionOpened, 46: Computed,
    47: Split, 48: Shrink, 49: Stepped, 56: Requeue, 57: Agreed,
    50: Call, 51: CancelCall, 52: Answer, 53: Return, 54: Metrics, 55: Command,
    60: StartExports, 61: ExportSegment, 62: FreeExports, 63: LendExport, 64: ExportOpened,
    65: UnlendExport, 66: DeviceMemory,
})  # fmt: skip
