"""What users write to declare a model: ``Tensor``, ``ModelConfig`` and its parts. The names and the
defaults are PyTriton's, and as there all but ``Tensor`` may be changed until they are bound. What they come
to is ``spec.ModelSpec``, whose options they spell; no I/O here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuserve.declare.spec import BatchingSpec, QueueSpec


@dataclass(frozen=True)
class Tensor:
    """One input or output of a model, as ``bind()`` takes it.

    Args:
        shape: without the batch axis where the model batches; -1 is any size.
        dtype: a numpy dtype, a scalar type, or a string: "float32", "FP32", "bytes".
        name: INPUT_1…, OUTPUT_1… by position when left out.
        optional: a request may leave this input out.
        labels: names of the classes of an output, by position, for requests that ask for classification.
        memory: where an input is given to the callable: "gpu", on the GPU of its instance, as an array of the
            kind that ``ModelConfig.array`` says, or "cpu". None follows from that kind.
    """

    shape: tuple[int, ...]
    dtype: Any
    name: str | None = None
    optional: bool | None = False
    labels: Sequence[str] | None = None
    memory: str | None = None


class TimeoutAction(enum.Enum):
    """What becomes of a request whose time in the queue ran out."""

    REJECT = "REJECT"  #: it is refused
    DELAY = "DELAY"  #: all others of its priority go before it


@dataclass
class QueuePolicy:
    """How long, in microseconds, and how many requests may wait; 0 is no limit.

    With ``allow_timeout_override`` a request's own parameter ``timeout`` may shorten its time.
    """

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass
class DynamicBatcher:
    """How requests are merged, and in which order they are taken. Times in microseconds.

    A batch waits at most ``max_queue_delay_microseconds`` for one of ``preferred_batch_size``. With
    ``priority_levels`` requests carry a level from 1, which goes first, to that number; one that names
    none has ``default_priority_level``. ``priority_queue_policy`` replaces ``default_queue_policy`` for
    single levels.
    """

    max_queue_delay_microseconds: int = 0
    preferred_batch_size: Sequence[int] | None = None
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: Mapping[int, QueuePolicy] | None = None


@dataclass
class WarmupInput:
    """One input of a warm-up request, without the batch axis: zeros, random values, or a ``.npy`` file.

    Where several are given, the file comes before zeros, zeros before random values.
    """

    dtype: Any
    shape: tuple[int, ...]
    zero_data: bool = False
    random_data: bool = False
    input_data_file: str | None = None


@dataclass
class ModelWarmup:
    """A batch that every instance runs ``count`` times before the model is ready."""

    name: str
    batch_size: int
    inputs: Mapping[str, WarmupInput]
    count: int = 1


@dataclass
class SequenceControl:
    """An input of shape [1], behind the batch axis where there is one, that the server fills in a batch of
    sequences.

    Args:
        name: of the input; no request brings it.
        kind: "start", "end" and "ready" are flags; "corrid" is the sequence's id.
        dtype: of a flag int32, float32 or bool; of the id uint64, int64, uint32, int32 or "bytes". None is
            int32, or uint64 for the id.
        false_true: what a flag is told by.
    """

    name: str
    kind: str
    dtype: Any = None
    false_true: Sequence[float] = (0, 1)


@dataclass
class SequenceBatching:
    """The requests of a model belong to sequences, each of which always meets the same instance.

    With ``strategy`` "direct" a sequence has a row in the batches of its instance, which has as many as its
    largest batch; with "oldest" the next requests of ``max_candidate_sequences`` sequences (0: as many) are
    merged as the model's ``batcher`` says. More sequences wait. With "direct" a batch may wait for the
    batcher's delay until ``minimum_slot_utilization`` of the rows have a request. A sequence without a
    request for ``max_sequence_idle_microseconds`` is dropped.
    """

    strategy: str = "direct"
    max_sequence_idle_microseconds: int = 1_000_000
    max_candidate_sequences: int = 0
    minimum_slot_utilization: float = 0.0
    controls: Sequence[SequenceControl] = ()


@dataclass
class Resource:
    """So much of a named resource. A ``shared`` one is there once for all devices, others once a device."""

    name: str
    count: int = 1
    shared: bool = False


@dataclass
class RateLimiter:
    """What an instance holds while it runs, on a server with ``rate_limit="execution_count"``.

    Of those that wait, the one with the lowest executions times ``priority`` goes first.
    """

    resources: Sequence[Resource] = ()
    priority: int = 0


@dataclass(frozen=True)
class Step:
    """One model that an ensemble asks, as ``Server.ensemble()`` takes it.

    Args:
        model: its name.
        inputs: for each input of that model, the name of the ensemble's tensor that it gets.
        outputs: for each output of that model that is used, the name of the ensemble's tensor that it makes.
        version: of that model; None is the latest at the time of a request.
    """

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    version: int | None = None


@dataclass
class ModelConfig:
    """How a bound model is run.

    With ``batching=False`` the tensors' shapes are complete and every request is its own call.
    With ``batcher=None`` requests may carry a batch but are never merged. In place of the batcher,
    ``batching`` may be a ``Batching``, and ``queue`` a ``Queue``: with them options have the names that they
    have in a config file.
    ``decoupled`` models answer a request with any number of responses, each sent as it is produced.
    ``response_cache`` answers a request that was seen before from memory. ``sequence_batching`` says that
    requests belong to sequences, ``rate_limiter`` what each instance needs to run.
    ``array`` is the kind of array that inputs come as: "numpy", on the host; "cupy" or "torch", on the GPU of
    the instance; None is "cupy" where an input says memory="gpu", otherwise "numpy". All else is as the
    config file has it, and described in docs/reference.md.
    """

    batching: bool | BatchingSpec = True
    max_batch_size: int = 4
    batcher: DynamicBatcher | None = field(default_factory=DynamicBatcher)
    response_cache: bool = False
    decoupled: bool = False
    model_warmup: Sequence[ModelWarmup] | None = None
    sequence_batching: SequenceBatching | None = None
    rate_limiter: RateLimiter | None = None
    array: str | None = None
    queue: QueueSpec | None = None
    prefetch: int | None = None
    read_only_inputs: bool = False
    retry_on_worker_death: bool = True
