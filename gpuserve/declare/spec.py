"""What a model is, complete: ``ModelSpec`` and its parts, to which ``bind()``, the config file and a client's
load request come alike, and which the supervisor, the front and (in part) the workers are given. The classes
are the tables of a model's options: a field made by ``option`` is one, said once, for all who take or tell it
(see ``gpuserve/options``). Plain values only, no I/O; what must hold between several options is in
``rules.py``, and the classes that programs write in ``model.py``.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gpuserve.devices.names import CPU, check_device_name
from gpuserve.devices.placement import ANYWHERE, Placement
from gpuserve.errors import BindError
from gpuserve.options import by_keyword, option, rebuilt, required, spelled
from gpuserve_worker.protocol.tensor import TensorSpec, datatype_of

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
#: Batches under way at once in one instance.
MAX_CONCURRENCY: Final = 4096
#: Instances of one model that may be declared at once.
MAX_INSTANCES: Final = 256
#: Triton's own level is 64 bits wide.
MAX_PRIORITY_LEVELS: Final = (1 << 64) - 1
#: What ``on_unrecoverable`` may say.
SHUTDOWN: Final = "shutdown"
RESTART_WORKER: Final = "restart_worker"
#: What ``array`` may say.
NUMPY: Final = "numpy"
CUPY: Final = "cupy"
TORCH: Final = "torch"
ARRAYS: Final = (NUMPY, CUPY, TORCH)
#: What ``timeout_action`` may say.
REJECT: Final = "reject"
DELAY: Final = "delay"
#: What ``fairness`` may say.
NONE: Final = "none"
CLIENT: Final = "client"
_HEADER_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]*")


def check_model_name(name: object) -> str:
    """The name, if a model may have it. Raises BindError: not a string, empty, too long, or with other
    characters than the allowed ones.
    """
    if not isinstance(name, str) or not name:
        raise BindError("Model name cannot be empty")
    if MODEL_NAME.fullmatch(name) is None:
        raise BindError(
            f"Model name {name[:140]!r} is not allowed: it can only contain alphanumeric characters, "
            "dots, underscores and dashes, begins with no dot or dash and has at most 128 characters"
        )
    return name


def check_header_name(name: Any) -> str:
    """The name in lower case, if a header may have it, or ""; ValueError: none may."""
    if not isinstance(name, str) or _HEADER_NAME.fullmatch(name.lower()) is None:
        raise ValueError(f"expected the name of a header, given {name!r}")
    return str(name.lower())


# ---- batches and the queue ----------------------------------------------------------------------


@spelled
@dataclass(frozen=True, slots=True)
class BatchingSpec:
    """When a batch is formed; the semantics are those of Triton's dynamic batcher."""

    max_queue_delay_us: int = option(
        0,
        "Microseconds that a request may wait for others to fill a batch.",
        least=0,
        triton="max_queue_delay_microseconds",
    )
    preferred_batch_sizes: tuple[int, ...] = option(
        (), "Batch sizes to wait for; each at most max_batch_size.", least=1, triton="preferred_batch_size"
    )
    merge: bool = option(True, "Whether a batch may hold more than one request.")
    preserve_ordering: bool = option(
        False,
        "Whether answers are given in the order in which the requests came.",
        triton="preserve_ordering",
    )


@spelled
@dataclass(frozen=True, slots=True)
class PolicySpec:
    """How long and how many requests of one priority may wait."""

    timeout_action: str = option(
        REJECT,
        "What becomes of a request whose time in the queue ran out: reject refuses it, delay lets all others "
        "of its priority go first.",
        words=(REJECT, DELAY),
        triton="timeout_action",
    )
    default_timeout_us: int = option(
        0,
        "Microseconds that a request may wait; 0 is no limit.",
        least=0,
        triton="default_timeout_microseconds",
    )
    allow_timeout_override: bool = option(
        False,
        "Whether a request's own parameter timeout may shorten its time.",
        triton="allow_timeout_override",
    )
    max_requests: int = option(0, "Requests that may wait; 0 is no limit.", least=0, triton="max_queue_size")


@spelled
@dataclass(frozen=True, slots=True)
class QueueSpec:
    """How much may wait for a model before requests are refused, and in which order it is taken.

    A request that names a level which there is not has ``default_priority``. ``policies`` holds those that
    replace ``policy``, by level.
    """

    max_requests: int = option(4096, "Requests that may wait.", least=1)
    max_nbytes: int = option(2 << 30, "Bytes of tensors that may wait.", least=1)
    priority_levels: int = option(
        0,
        "Levels of priority; 1 goes first. 0: all requests are alike.",
        least=0,
        most=MAX_PRIORITY_LEVELS,
        triton="priority_levels",
    )
    default_priority: int = option(
        0,
        "Level of a request that names none; from 1 to priority_levels.",
        least=0,
        triton="default_priority_level",
    )
    policy: PolicySpec = option(PolicySpec(), "Limits of every level.", triton="default_queue_policy")
    policies: tuple[tuple[int, PolicySpec], ...] = option(
        (),
        "Limits of single levels, in place of policy: policies: {1: {max_requests: 8}}.",
        triton="priority_queue_policy",
    )
    fairness: str = option(
        NONE,
        "client: within a level of priority clients take turns, by rows, and a full queue lets a new request "
        "in by dropping the newest of the client that has the most.",
        words=(NONE, CLIENT),
    )
    fairness_header: str = option(
        "",
        "Request header (metadata key) that tells clients apart; without it, or where it is empty, they are "
        "told apart by their addresses.",
        read=check_header_name,
    )


# ---- sequences ----------------------------------------------------------------------------------

#: A sequence has a row of the batch of one instance.
DIRECT: Final = "direct"
#: The next requests of many sequences are merged as the dynamic batcher does.
OLDEST: Final = "oldest"
#: What an input that tells of the sequence can hold.
START: Final = "start"
END: Final = "end"
READY: Final = "ready"
CORRID: Final = "corrid"
CONTROL_KINDS: Final = (START, END, READY, CORRID)


@dataclass(frozen=True, slots=True)
class SequenceControl:
    """An input of shape [1], behind the batch axis where there is one, that the server fills."""

    name: str = required("Name of the input; no request brings it.", some=True)
    kind: str = required("start, end and ready are flags; corrid is the sequence's id.", words=CONTROL_KINDS)
    dtype: Any = option(
        None,
        "Of a flag int32, float32 or bool, of the id uint64, int64, uint32, int32 or bytes; null: int32, or "
        "uint64 for the id.",
        nullable=True,
        read=datatype_of,
    )
    false_true: tuple[Any, Any] = option((0, 1), "What a flag is told by.")


@spelled
@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """The requests of a model belong to sequences, each of which always meets the same instance.

    When a batch of ready sequences is formed is said by ``BatchingSpec``; with "direct" by its delay alone.
    """

    strategy: str = option(
        DIRECT,
        "direct: a sequence has a row in the batches of its instance; oldest: the next requests of many "
        "sequences are merged as batching says.",
        words=(DIRECT, OLDEST),
    )
    max_sequence_idle_us: int = option(
        1_000_000,
        "Microseconds without a request after which a sequence is dropped.",
        least=1,
        triton="max_sequence_idle_microseconds",
    )
    max_candidate_sequences: int = option(
        0,
        "Sequences that an instance works on at the same time (oldest); 0: as many as max_batch_size.",
        least=0,
        most=1 << 16,  # so many seats are made at every instance
    )
    minimum_slot_utilization: float = option(
        0.0,
        "Part of the rows that must have a request, or a batch waits for max_queue_delay_us (direct).",
        least=0,
        most=1,
    )
    controls: Sequence[SequenceControl] = option((), "Inputs that tell the callable of the sequences.")

    def seats(self, max_batch_size: int) -> int:
        """How many sequences an instance works on at the same time."""
        rows = max(1, max_batch_size)
        return self.max_candidate_sequences or rows if self.strategy == OLDEST else rows

    def control(self, kind: str) -> SequenceControl | None:
        """The input of that kind, if there is one."""
        return next((one for one in self.controls if one.kind == kind), None)

    @property
    def keeps_rows(self) -> bool:
        """Whether a sequence has the same row in every batch: the others are there too, and not ready."""
        return self.strategy == DIRECT and self.control(READY) is not None


#: The strategy "" says that a model knows no sequences.
NO_SEQUENCES: Final = SequenceBatching(strategy="")


# ---- rates --------------------------------------------------------------------------------------

#: The name of a resource, and the device where it is; "" for one that all devices share.
DeviceResource: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Resource:
    """An amount of a named resource that an instance needs while it runs."""

    name: str = required("Name of the resource.", some=True)
    count: int = option(1, "How much of it an instance needs.", least=1)
    shared: bool = option(False, "Whether it is there once for all devices, and not once a device.")


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """What an instance holds while it runs, on a server that limits rates."""

    resources: Sequence[Resource] = option(
        (),
        "What an instance holds while it runs: name, count (1), and shared (false): there once for all "
        "devices, not once a device.",
    )
    priority: int = option(
        0,
        "Of the instances that wait, the one with the lowest executions times priority goes first; 0 counts "
        "as 1.",
        least=0,
    )

    def needs(self, device: str) -> dict[DeviceResource, int]:
        """How much of each resource an instance on that device needs."""
        needs: dict[DeviceResource, int] = {}
        for one in self.resources:
            resource = (one.name, "" if one.shared else device)
            needs[resource] = needs.get(resource, 0) + one.count
        return needs


NO_RATE: Final = RateLimiter()


# ---- parts that are no options ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LabelSpec:
    """The labels of one output, by the position of the element that each names.

    ``filename`` is where they were read from, or "".
    """

    output: str
    labels: tuple[str, ...]
    filename: str = ""


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One model that an ensemble asks; version 0 is the latest. Outputs that are not named are not asked for.

    ``inputs`` and ``outputs`` are pairs: a tensor of that model, and the tensor of the ensemble that it is.
    """

    model: str = required("Name of a model of this file; an ensemble too.", read=check_model_name)
    version: int = option(
        0, "Its version; null: the latest at the time of a request.", least=1, nullable=True
    )
    inputs: tuple[tuple[str, str], ...] = option(
        (), "For each input of that model, the tensor of the ensemble that it gets."
    )
    outputs: tuple[tuple[str, str], ...] = option(
        (),
        "For each output of that model that is used, the tensor of the ensemble that it makes.",
        some=True,
        needed=True,
    )


@dataclass(frozen=True, slots=True)
class Resources:
    """What one process takes, for ``gpuserve export``; the server itself holds it to nothing of it."""

    cpus: int = option(1, "Cores that it keeps busy.", least=1)
    memory_nbytes: int | None = option(
        None,
        "Memory of the host: libraries, weights; without tensors of requests. null: assumed.",
        least=1,
    )
    gpu_memory_nbytes: int | None = option(
        None, "Memory of its GPU; null: not known, and not checked.", least=1
    )


@dataclass(frozen=True, slots=True)
class DeclaredInstances:
    """Worker processes of a model on one device, as a file declares them."""

    device: str = option(
        CPU,
        "cpu; cuda:0, cuda:1, …; cuda:* for every GPU; or the UUID of a GPU (GPU-…) or of a MIG instance "
        "(MIG-…).",
        read=check_device_name,
        examples=("cpu", "cuda:0", "cuda:*"),
    )
    count: int = option(1, "How many processes on this device.", least=1, most=MAX_INSTANCES)
    rate_limiter: RateLimiter | None = option(
        None, "What each needs to run, where the server has a rate_limit."
    )
    resources: Resources = option(Resources(), "What one process takes, for gpuserve export.")


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One worker process: its name, its device, and where its callable comes from (``wire.Init.source``).

    ``device`` is as it was written until the instance is placed, and "cpu" or "cuda:N" from then on.
    ``rate`` is what it needs before it may run, on a server that limits rates.
    """

    name: str
    device: str
    source: dict[str, Any]
    rate: RateLimiter = NO_RATE
    placement: Placement = ANYWHERE


# ---- the model ----------------------------------------------------------------------------------


@by_keyword
class ModelOptions:
    """Options that ``ModelConfig`` and a file have alike: a row here is all that makes one."""

    array: str = option(
        NUMPY,
        "Arrays that inputs come as: numpy, on the host; cupy or torch, on the GPU of the instance; null: "
        "cupy where an input has memory: gpu, otherwise numpy.",
        words=ARRAYS,
        nullable=True,
    )
    prefetch: int = option(
        0,
        "Full batches that wait inside a worker; null: 1 on a GPU, 0 on the CPU.",
        least=0,
        most=16,
        nullable=True,
    )
    read_only_inputs: bool = option(False, "Whether the callable never writes to its inputs.")
    request_details: bool = option(
        False,
        "Whether the callable is told the id, the priority and the timeout of each request (details of a "
        "Request).",
    )
    openai: bool = option(
        False,
        "Whether OpenAI's clients are served: the callable takes typed requests of gpuserve.openai, and the "
        "model has no inputs and outputs of its own.",
    )
    retry_on_worker_death: bool = option(
        True,
        "Whether a batch runs once more when the worker that had it died; never where decoupled or in "
        "sequences.",
    )
    execution_timeout_s: float = option(
        0.0,
        "Seconds that a call of the callable may take, or the next response of a stream; then its worker is "
        "killed and replaced, and its requests get DEADLINE_EXCEEDED. 0 is no limit: the log tells of a call "
        "that takes over a minute.",
        least=0,
    )


#: What of a declaration decides how its requests look, and their answers.
_OF_REQUESTS: Final = ("inputs", "outputs", "max_batch_size", "decoupled", "sequence", "labels")


@dataclass(frozen=True, slots=True)
class ModelSpec(ModelOptions):  # type: ignore[misc]  # its base is frozen too, see ``by_keyword``
    """A model, complete. ``max_batch_size`` 0 means that the model does not batch.

    ``concurrency`` 0 leaves it to the worker, which knows what kind its callable is. ``array`` is the kind of
    array that the callable is given. ``warmup`` is what ``wire.Init.warmup`` says. An ensemble has ``steps``,
    and no ``instances``. ``exact``: it is as strict as PyTriton is, which casts nothing and lets outputs
    be left out. ``all_lines``: clients are told every line of what the callable raised, as PyTriton does.
    ``triton_config`` is what a model repository says of it that clients are told and no option
    holds: a ``ModelConfig`` message, serialised.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = option(
        0,
        "Largest batch; 0: the model does not batch and its shapes are complete.",
        least=0,
        triton="max_batch_size",
    )
    instances: tuple[InstanceSpec, ...] = ()
    version: int = option(
        1, "Version in requests. Entries of one name and several versions are one model.", least=1
    )
    batching: BatchingSpec = option(BatchingSpec(), "How requests are merged.")
    queue: QueueSpec = option(QueueSpec(), "How much may wait.")
    concurrency: int = option(
        0,
        "Batches that an async callable or a generator has under way at once in one instance; null: by the "
        "kind of the callable.",
        least=1,
        most=MAX_CONCURRENCY,
        nullable=True,
    )
    strict: bool = option(
        True,
        "Whether outputs that do not fit their declaration are errors: another name, one left out, a dtype "
        "that is not cast safely, another shape. false: cast, dropped or sent as they are.",
    )
    decoupled: bool = option(
        False,
        "Whether a request is answered by any number of responses, as they are produced.",
        triton="model_transaction_policy.decoupled",
    )
    response_cache: bool = option(
        False,
        "Whether a request that was seen before is answered from memory.",
        triton="response_cache.enable",
    )
    on_unrecoverable: str = option(
        SHUTDOWN,
        "What UnrecoverableError ends: the whole server (shutdown), or the instance, which is replaced "
        "(restart_worker).",
        words=(SHUTDOWN, RESTART_WORKER),
    )
    warmup: tuple[Any, ...] = ()
    sequence: SequenceBatching = NO_SEQUENCES
    labels: tuple[LabelSpec, ...] = ()
    steps: tuple[StepSpec, ...] = ()
    exact: bool = False
    all_lines: bool = False
    triton_config: bytes = b""

    @property
    def is_ensemble(self) -> bool:
        """Whether its requests are answered by other models, and it has no instance of its own."""
        return bool(self.steps)

    @property
    def in_sequences(self) -> bool:
        """Whether every request belongs to a sequence."""
        return bool(self.sequence.strategy)

    def takes_requests_of(self, other: ModelSpec) -> bool:
        """Whether every request that another declaration takes is one of this one too, and answered alike."""
        return all(getattr(self, name) == getattr(other, name) for name in _OF_REQUESTS)

    def to_wire(self) -> dict[str, Any]:
        """The spec as plain data for another process, without the instances' callables; of their placements
        only the UUID of the GPU.
        """
        instances = tuple(
            dataclasses.replace(one, source={}, placement=Placement(one.placement.gpu_uuid))
            for one in self.instances
        )
        values = dataclasses.astuple(dataclasses.replace(self, instances=instances))
        names = [one.name for one in dataclasses.fields(self)]
        return dict(zip(names, values, strict=True))

    @classmethod
    def from_wire(cls, plain: dict[str, Any]) -> ModelSpec:
        """The inverse of ``to_wire``; the instances' sources are empty."""
        hints = typing.get_type_hints(cls)
        if plain.keys() != hints.keys():
            raise ValueError(f"other fields than those of a model: {plain.keys() ^ hints.keys()}")
        return cls(**{name: rebuilt(hints[name], one) for name, one in plain.items()})
