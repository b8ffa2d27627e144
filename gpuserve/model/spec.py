"""``ModelSpec``, the complete declaration of a model, and its parts.

``bind()``, the config file and a client's load request all produce a ``ModelSpec``. The supervisor and the
front receive the whole spec, workers receive a part. The classes are option tables: a field made by
``option`` is an option, defined once for the file, for programs and for clients (see
``gpuserve/model/options.py``). All values are plain data. Rules between several options are in ``rules.py``;
the classes that programs write are in ``declaration.py``.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gpuserve.core.errors import BindError
from gpuserve.core.suggestions import explained
from gpuserve.devices.names import CPU, check_device_name, devices_of
from gpuserve.devices.placement import ANYWHERE, Placement
from gpuserve.model.options import by_keyword, from_plain, option, required, spelled
from gpuserve_worker.protocol.tensor import TensorSpec, datatype_of

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
MAX_CONCURRENCY: Final = 4096
MAX_INSTANCES: Final = 256
MAX_RANKS: Final = 64
#: Default of ``max_batch_elements`` of a model with ragged inputs: it bounds the memory of padding.
RAGGED_BATCH_ELEMENTS: Final = 1 << 24
#: Triton's priority level is 64 bits wide.
MAX_PRIORITY_LEVELS: Final = (1 << 64) - 1
#: Values of ``on_unrecoverable``.
SHUTDOWN: Final = "shutdown"
RESTART_WORKER: Final = "restart_worker"
#: Values of ``array``.
NUMPY: Final = "numpy"
CUPY: Final = "cupy"
TORCH: Final = "torch"
ARRAYS: Final = (NUMPY, CUPY, TORCH)
#: Values of ``timeout_action``.
REJECT: Final = "reject"
DELAY: Final = "delay"
#: Values of ``fairness``.
NONE: Final = "none"
CLIENT: Final = "client"
_HEADER_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]*")


def check_model_name(name: object) -> str:
    """Return a model's name; raise BindError if it is no text, empty, too long, or has wrong characters."""
    if not isinstance(name, str | None):
        raise BindError(f"Model name must be a string, got an object of type {type(name).__name__}")
    if not name:
        raise BindError("Model name cannot be empty")
    if MODEL_NAME.fullmatch(name) is None:
        raise BindError(
            f"Model name {name[:140]!r} is not allowed: it can only contain alphanumeric characters, "
            "dots, underscores and dashes, begins with no dot or dash and has at most 128 characters"
        )
    return name


def check_header_name(name: Any) -> str:
    """Return the name of a header in lower case, or ""; raise ValueError if no header can have the name."""
    if not isinstance(name, str) or _HEADER_NAME.fullmatch(name.lower()) is None:
        raise ValueError(f"expected the name of a header, given {name!r}")
    return str(name.lower())


# ---- batches and the queue ----------------------------------------------------------------------


@spelled
@explained
@dataclass(frozen=True, slots=True)
class BatchingSpec:
    """Batching options: when a batch is formed, with the semantics of Triton's dynamic batcher."""

    # fmt: off
    max_queue_delay_us: int = option(0,
        "Microseconds that a request may wait for other requests to fill a batch.", least=0,
        triton="max_queue_delay_microseconds")
    preferred_batch_sizes: tuple[int, ...] = option((),
        "Batch sizes to wait for; each at most max_batch_size.", least=1, triton="preferred_batch_size")
    merge: bool = option(True, "Whether a batch may hold more than one request.")
    anticipate: bool = option(True,
        "Whether a batch waits, without a max_queue_delay_us, for clients that have just been answered and "
        "send again at once, if that makes more requests a second; for at most the duration of a batch.")
    preserve_ordering: bool = option(False,
        "Whether responses are sent in the order in which the requests arrived.", triton="preserve_ordering")
    max_batch_elements: int = option(0,
        "Largest batch in elements: its rows, times the elements of a row of the largest ragged input if all "
        "rows are padded to one shape, or of the largest input. 0: no limit, or 16777216 if an input is "
        "ragged. A request with more runs alone.", least=0)
    max_batch_nbytes: int = option(64 << 20,
        "Largest batch in bytes of its inputs; 0: no limit. A larger request runs alone, without a copy.",
        least=0)
    bucket_boundaries: tuple[int, ...] = option((),
        "Ascending lengths, as the first variable size of a ragged input. A batch holds requests between two "
        "of them.", least=1)
    # fmt: on


@spelled
@explained
@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The queue policy of one priority level: how long and how many requests may wait."""

    # fmt: off
    timeout_action: str = option(REJECT,
        "Action when the queue timeout of a request expires: reject refuses the request, delay moves it "
        "behind all other requests of its priority.", words=(REJECT, DELAY), triton="timeout_action")
    default_timeout_us: int = option(0,
        "Microseconds that a request may wait; 0 is no limit.", least=0,
        triton="default_timeout_microseconds")
    allow_timeout_override: bool = option(False,
        "Whether a request's own parameter timeout may shorten the timeout.", triton="allow_timeout_override")
    max_requests: int = option(0, "Requests that may wait; 0 is no limit.", least=0, triton="max_queue_size")
    # fmt: on


@spelled
@explained
@dataclass(frozen=True, slots=True)
class QueueSpec:
    """Queue options: how much may wait before requests are refused, and in which order requests are dequeued.

    A request with an unknown priority level has ``default_priority``. ``policies`` replace ``policy`` for
    single levels.
    """

    # fmt: off
    max_requests: int = option(4096, "Requests that may wait.", least=1)
    max_nbytes: int = option(2 << 30, "Bytes of input tensors that may wait.", least=1)
    priority_levels: int = option(0,
        "Number of priority levels; level 1 is dequeued first. 0: all requests have the same priority.",
        least=0, most=MAX_PRIORITY_LEVELS, triton="priority_levels")
    default_priority: int = option(0,
        "Priority level of a request that names none; from 1 to priority_levels.", least=0,
        triton="default_priority_level")
    policy: PolicySpec = option(PolicySpec(), "Queue policy of every level.", triton="default_queue_policy")
    policies: tuple[tuple[int, PolicySpec], ...] = option((),
        "Queue policies of single levels, in place of policy: policies: {1: {max_requests: 8}}.",
        triton="priority_queue_policy")
    fairness: str = option(NONE,
        "client: within a priority level, clients take turns by rows (by batches while requests of several "
        "shapes wait), and a full queue admits a new request by dropping the newest request of the client "
        "with the most rows.", words=(NONE, CLIENT))
    fairness_header: str = option("",
        "Request header (metadata key) that identifies the client; clients without the header are "
        "identified by their addresses.", read=check_header_name)
    # fmt: on


# ---- sequences ----------------------------------------------------------------------------------

#: Strategy: a sequence has its own row in the batches of one instance.
DIRECT: Final = "direct"
#: Strategy: the next requests of many sequences are batched as by the dynamic batcher.
OLDEST: Final = "oldest"
#: Kinds of control inputs.
START: Final = "start"
END: Final = "end"
READY: Final = "ready"
CORRID: Final = "corrid"
CONTROL_KINDS: Final = (START, END, READY, CORRID)


@explained
@dataclass(frozen=True, slots=True)
class SequenceControl:
    """A control input of shape [1], behind the batch axis if there is one, that the server fills."""

    # fmt: off
    name: str = required("Name of the input; no request contains it.", some=True)
    kind: str = required("start, end and ready are flags; corrid is the id of the sequence.",
        words=CONTROL_KINDS)
    dtype: Any = option(None,
        "Dtype: int32, float32 or bool for a flag; uint64, int64, uint32, int32 or bytes for the id. null: "
        "int32, or uint64 for the id.", nullable=True, read=datatype_of)
    false_true: tuple[Any, Any] = option((0, 1), "The two values of a flag: false, true.")
    # fmt: on


@spelled
@explained
@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Sequence batching: all requests of a sequence are executed by the same instance.

    ``BatchingSpec`` says when a batch of ready sequences is formed; with the strategy "direct" only its delay
    applies.
    """

    # fmt: off
    strategy: str = option(DIRECT,
        "direct: a sequence has a row in the batches of its instance; oldest: the next requests of many "
        "sequences are batched by the options of batching.", words=(DIRECT, OLDEST))
    max_sequence_idle_us: int = option(1_000_000,
        "Microseconds without a request after which a sequence is dropped.", least=1,
        triton="max_sequence_idle_microseconds")
    max_candidate_sequences: int = option(
        0,
        "Sequences that an instance serves at the same time (oldest); 0: max_batch_size.",
        least=0,
        most=1 << 16,  # every instance has that many seats
    )
    minimum_slot_utilization: float = option(0.0,
        "Fraction of the rows that must have a request before a batch is formed without waiting for "
        "max_queue_delay_us (direct).", least=0, most=1)
    controls: Sequence[SequenceControl] = option((),
        "Control inputs, which describe the sequences to the callable.")
    # fmt: on

    def seats(self, max_batch_size: int) -> int:
        """Return the number of sequences that an instance serves at the same time."""
        rows = max(1, max_batch_size)
        return self.max_candidate_sequences or rows if self.strategy == OLDEST else rows

    def control(self, kind: str) -> SequenceControl | None:
        return next((one for one in self.controls if one.kind == kind), None)

    @property
    def keeps_rows(self) -> bool:
        """Return whether a sequence has the same row in every batch; idle sequences are not ready."""
        return self.strategy == DIRECT and self.control(READY) is not None


#: The strategy "": the model does not use sequences.
NO_SEQUENCES: Final = SequenceBatching(strategy="")


#: A resource's name and its device; "" for a resource that all devices share.
DeviceResource: TypeAlias = tuple[str, str]


@explained
@dataclass(frozen=True, slots=True)
class Resource:
    """An amount of a named resource that an instance needs while it executes."""

    name: str = required("Name of the resource.", some=True)
    count: int = option(1, "Amount that an instance needs.", least=1)
    shared: bool = option(False, "Whether all devices share one amount, in place of one amount per device.")


@explained
@dataclass(frozen=True, slots=True)
class RateLimiter:
    """The resources that an instance holds while it executes, on a server with ``rate_limit``."""

    # fmt: off
    resources: Sequence[Resource] = option((),
        "Resources that an instance holds while it executes: name, count (1), and shared (false): one "
        "amount for all devices, not one per device.")
    priority: int = option(0,
        "Of the waiting instances, the one with the lowest product of executions and priority runs first; 0"
        " counts as 1.", least=0)
    # fmt: on

    def needs(self, device: str) -> dict[DeviceResource, int]:
        """Return the amount of each resource that an instance on a device needs."""
        needs: dict[DeviceResource, int] = {}
        for one in self.resources:
            resource = (one.name, "" if one.shared else device)
            needs[resource] = needs.get(resource, 0) + one.count
        return needs


NO_RATE: Final = RateLimiter()


# ---- parts that are not options -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LabelSpec:
    """The labels of one output, by the position of the element. ``filename`` is the label file, or ""."""

    output: str
    labels: tuple[str, ...]
    filename: str = ""


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One step of an ensemble; version 0 is the latest. ``inputs`` and ``outputs`` are pairs: a tensor of the
    step's model and the ensemble's. Outputs that are not named are not computed for the ensemble.
    """

    # fmt: off
    model: str = required("Name of a model of this file; may be an ensemble.", read=check_model_name)
    version: int = option(0,
        "Version of the model; null: the latest at the time of a request.", least=1, nullable=True)
    inputs: tuple[tuple[str, str], ...] = option((),
        "For each input of the model, the tensor of the ensemble that it receives.")
    outputs: tuple[tuple[str, str], ...] = option((),
        "For each used output of the model, the tensor of the ensemble that it produces.", some=True,
        needed=True)
    # fmt: on


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one process, for ``gpuserve export``; the server itself enforces none of them."""

    # fmt: off
    cpus: int = option(1, "Cores that the process keeps busy.", least=1)
    memory_nbytes: int | None = option(None,
        "Host memory of the process: libraries and weights, without tensors of requests. null: an assumed "
        "size.", least=1)
    gpu_memory_nbytes: int | None = option(None,
        "GPU memory of the process; null: gpu_memory_nbytes of the model, or unknown and not checked.",
        least=1)
    # fmt: on


@dataclass(frozen=True, slots=True)
class DeclaredInstances:
    """Worker processes of a model on one device, as a file declares them."""

    # fmt: off
    device: str = option(CPU,
        "cpu; cuda:0, cuda:1, …; cuda:* for every GPU; auto for the GPU with the most free memory; the UUID "
        "of a GPU (GPU-…) or of a MIG instance (MIG-…); or a list of GPUs that each process uses together.",
        read=check_device_name, examples=("cpu", "cuda:0", "cuda:*", "auto", ["cuda:0", "cuda:1"]))
    count: int = option(1, "Number of processes on this device.", least=1, most=MAX_INSTANCES)
    rate_limiter: RateLimiter | None = option(None,
        "Resources that each instance needs while it executes, if the server has a rate_limit.")
    ranks: int = option(1,
        "Processes of each instance, which run its batches together: one on each GPU of the list in "
        "device, or all on the CPU.", least=1, most=MAX_RANKS)
    threads: int | None = option(None,
        "Threads of numerical libraries in each process; null: OMP_NUM_THREADS, or a share of the cores.",
        least=1)
    cpus: tuple[int, ...] = option((), "CPUs on which the processes run; empty: all.", least=0)
    gpu_share: float = option(0.0,
        "Part of a GPU's multiprocessors on which a kernel of the process runs at most, by CUDA's MPS; "
        "0: no limit.", least=0, most=1)
    resources: Resources = option(Resources(), "Resources of one process, for gpuserve export.")
    # fmt: on


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One worker: its name, its device, and the source of its callable (``wire.Init.source``, with the
    ``SealedMemory`` of a large pickle as ``memory``). ``device`` is the declared one until the instance is
    placed, and "cpu", "cuda:N" or "cuda:N+cuda:M" afterwards. ``rate`` are resources that the instance holds
    while it executes. With several ``ranks`` the worker is as many processes.
    """

    name: str
    device: str
    source: dict[str, Any]
    rate: RateLimiter = NO_RATE
    placement: Placement = ANYWHERE
    threads: int = 0
    cpus: tuple[int, ...] = ()
    ranks: int = 1
    gpu_share: float = 0.0

    @property
    def devices(self) -> list[str]:
        """Return its devices in order: "cuda:0" and "cuda:1" of "cuda:0+cuda:1"."""
        return devices_of(self.device)

    @property
    def first_device(self) -> str:
        """Return the device of inputs and outputs: several ranks have them from the host."""
        return CPU if self.ranks > 1 else self.devices[0]


@by_keyword
class ModelOptions:
    """The options that ``ModelConfig`` and a config file share: a row here defines the option for both."""

    # fmt: off
    array: str = option(NUMPY,
        "Library of the input arrays: numpy, on the host; cupy or torch, on the GPU of the instance; null: "
        "cupy if an input has memory: gpu, otherwise numpy.", words=ARRAYS, nullable=True)
    prefetch: int = option(0,
        "Full batches that are queued inside a worker; null: 1 on a GPU, 0 on the CPU.", least=0, most=16,
        nullable=True)
    read_only_inputs: bool = option(False, "Whether the callable never writes to its inputs.")
    owned_outputs: bool = option(False,
        "Whether the callable never writes again to memory on a GPU that it has returned. Otherwise each "
        "output is first copied within the GPU.")
    static_inputs: bool = option(False,
        "Whether inputs on a GPU begin at the same addresses in every batch, so that a CUDA graph captured "
        "once can be replayed. The callable runs one batch at a time.")
    request_details: bool = option(False,
        "Whether the callable receives the id, the priority and the timeout of each request (details of a "
        "Request).")
    openai: bool = option(False,
        "Whether OpenAI's clients are served: the callable takes typed requests of gpuserve.openai, and the"
        " model declares no inputs and outputs.")
    openai_names: tuple[str, ...] = option((),
        "Further names of the model for OpenAI's clients, such as LoRA adapters. The callable finds the name "
        "in the request's member model.")
    max_active: int = option(0,
        "Requests that a stepped callable (with admit and step) has active at once in one instance; 0: the "
        "callable is called. Default of a stepped callable: its attribute max_active, else 64.", least=0,
        most=MAX_CONCURRENCY)
    retry_on_worker_death: bool = option(True,
        "Whether a batch runs once more when its worker died; never for sequences, nor for decoupled models "
        "that are not stepped. A request of a stepped model runs again only before its first response.")
    execution_timeout_s: float = option(0.0,
        "Seconds that a call of the callable may take, or the next response of a stream; then the worker is"
        " killed and replaced, and its requests get DEADLINE_EXCEEDED. 0 is no limit: calls of over a "
        "minute are logged.", least=0)
    on_demand: bool = option(False,
        "Whether instances start when a request comes, and end when their memory is needed for other models "
        "(memory of server) or after idle_timeout_s. Without it a model is always loaded.")
    idle_timeout_s: float = option(0.0,
        "With on_demand: seconds without a request after which the instances end; 0: no limit.", least=0)
    memory_nbytes: int = option(0,
        "Memory of one instance with its weights, in bytes, for the memory budgets of server: on its GPU, or "
        "on the host if it runs on the CPU. 0: measured, or gpu_memory_nbytes.", least=0)
    gpu_memory_nbytes: int = option(0,
        "Limit of the memory that one instance allocates on its GPUs by CuPy or PyTorch, in bytes; 0: no "
        "limit. The CUDA context of the process, some 0.5 GiB, is not in it.", least=0)
    # fmt: on


#: The fields that determine the form of requests and responses.
_OF_REQUESTS: Final = ("inputs", "outputs", "max_batch_size", "decoupled", "sequence", "labels")


@dataclass(frozen=True, slots=True)
class ModelSpec(ModelOptions):  # type: ignore[misc]  # its base is frozen too, see ``by_keyword``
    """A complete model. ``max_batch_size`` 0 means that the model does not batch.

    ``concurrency`` 0 lets the worker choose by the kind of the callable. ``array`` is the library of the
    callable's arrays. ``warmup`` has the form of ``wire.Init.warmup``. An ensemble has ``steps`` and no
    ``instances``. ``exact`` applies PyTriton's strictness: no cast, and outputs may be left out. With
    ``all_lines`` clients receive every line of an exception's text, as from PyTriton. ``triton_config`` is a
    serialized ``ModelConfig`` message with the parts of a repository's config.pbtxt that clients receive and
    no option holds.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    # fmt: off
    max_batch_size: int = option(0,
        "Largest batch in rows; 0: the model does not batch, and shapes include all axes.", least=0,
        triton="max_batch_size")
    instances: tuple[InstanceSpec, ...] = ()
    version: int = option(1,
        "Version in requests. Entries of one name and several versions are one model.", least=1)
    batching: BatchingSpec = option(BatchingSpec(), "Options of batching.")
    queue: QueueSpec = option(QueueSpec(), "Options of the queue.")
    concurrency: int = option(0,
        "Batches that an async callable or a generator executes at once in one instance; null: by the kind "
        "of the callable.", least=1, most=MAX_CONCURRENCY, nullable=True)
    strict: bool = option(True,
        "Whether outputs that differ from their declaration are errors: another name, a missing output, a "
        "dtype that is not cast safely, another shape. false: such outputs are cast, dropped or sent "
        "unchanged.")
    decoupled: bool = option(False,
        "Whether a request has any number of responses, each sent as soon as it is produced.",
        triton="model_transaction_policy.decoupled")
    response_cache: bool = option(False,
        "Whether repeated requests are answered from memory.", triton="response_cache.enable")
    on_unrecoverable: str = option(SHUTDOWN,
        "Effect of UnrecoverableError: the server ends (shutdown), or the instance is replaced "
        "(restart_worker).", words=(SHUTDOWN, RESTART_WORKER))
    # fmt: on
    warmup: tuple[Any, ...] = ()
    sequence: SequenceBatching = NO_SEQUENCES
    labels: tuple[LabelSpec, ...] = ()
    steps: tuple[StepSpec, ...] = ()
    exact: bool = False
    all_lines: bool = False
    triton_config: bytes = b""

    @property
    def is_ensemble(self) -> bool:
        """Return whether other models answer the requests, so that the model has no instances."""
        return bool(self.steps)

    @property
    def declared_nbytes(self) -> dict[str, int]:
        """Return the declared memory of all instances by device; several GPUs of one have equal parts."""
        nbytes: Counter[str] = Counter()
        for one in self.instances:
            limit_nbytes = 0 if one.device == CPU else self.gpu_memory_nbytes
            part_nbytes = (self.memory_nbytes or limit_nbytes) // len(one.devices)
            nbytes.update(dict.fromkeys(one.devices, part_nbytes))
        return dict(nbytes)

    @property
    def in_sequences(self) -> bool:
        """Return whether every request belongs to a sequence."""
        return bool(self.sequence.strategy)

    def takes_requests_of(self, other: ModelSpec) -> bool:
        """Return whether every valid request of another spec is valid and has the same response here."""
        return all(getattr(self, name) == getattr(other, name) for name in _OF_REQUESTS)

    def to_wire(self) -> dict[str, Any]:
        """Return the spec as plain data, without callables; of a placement only the GPUs' UUIDs."""
        instances = tuple(
            dataclasses.replace(one, source={}, placement=Placement(one.placement.gpu_uuids))
            for one in self.instances
        )
        values = dataclasses.astuple(dataclasses.replace(self, instances=instances))
        names = [one.name for one in dataclasses.fields(self)]
        return dict(zip(names, values, strict=True))

    @classmethod
    def from_wire(cls, plain: dict[str, Any]) -> ModelSpec:
        """Return the spec of plain data from ``to_wire``; the sources of the instances are empty."""
        hints = typing.get_type_hints(cls)
        if plain.keys() != hints.keys():
            raise ValueError(f"other fields than those of a model: {plain.keys() ^ hints.keys()}")
        return cls(**{name: from_plain(hints[name], one) for name, one in plain.items()})


def ensemble_members(model: str, read: Callable[[str], Sequence[ModelSpec] | None]) -> list[str]:
    """Return the models of an ensemble's steps, and of nested ensembles, by ``read``: model to versions."""
    found: dict[str, None] = {}
    left = [model]
    while left:
        steps = [step for spec in read(left.pop()) or () for step in spec.steps]
        new = [step.model for step in steps if step.model not in found]
        found.update(dict.fromkeys(new))
        left += new
    return list(found)
