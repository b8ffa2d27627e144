"""What users write to declare a model, where PyTriton has a class for it: its names, its defaults, and as
there all but ``Tensor`` may be changed until they are bound. What they come to is ``spec.ModelSpec``, whose
tables are the classes for all else; no I/O here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from gpuserve.declare.spec import BatchingSpec, ModelOptions, QueueSpec, RateLimiter, SequenceBatching
from gpuserve.options import changeable, option, required, spelled
from gpuserve_worker.protocol.tensor import datatype_of

#: What ``memory`` of an input may say.
CPU: Final = "cpu"
GPU: Final = "gpu"
MEMORIES: Final = (CPU, GPU)
#: Where the values of a warm-up come from.
ZERO: Final = "zero"
RANDOM: Final = "random"
FILE: Final = "file"


@dataclass(frozen=True)
class Tensor:
    """One input or output of a model. One without a name is INPUT_1…, OUTPUT_1… by its position.

    Inputs alone may be optional or have a ``memory``, "gpu" or "cpu"; outputs alone have labels.
    """

    shape: tuple[int, ...] = required(
        "Shape without the batch axis where the model batches; -1 is any size.", least=-1, examples=([-1],)
    )
    dtype: Any = required(
        'A numpy name (float32), a v2 name (FP32), or "bytes".',
        read=datatype_of,
        examples=("float32", "FP32", "bytes"),
    )
    name: str | None = option(None, "Name of the tensor.", some=True, needed=True)
    optional: bool | None = option(False, "Whether a request may leave this input out.")
    labels: Sequence[str] | None = option(
        None, "Names of its classes, by position, for requests that ask for classification."
    )
    memory: Literal["gpu", "cpu"] | None = option(
        None,
        "Where the callable is given it: gpu, that of its instance, or cpu; null: as array.",
        words=MEMORIES,
    )


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


@spelled
@dataclass
class WarmupInput:
    """One input of a warm-up request: zeros, random values, or a ``.npy`` file.

    ``zero_data`` and ``random_data`` are PyTriton's way to say ``values``. Where several are given, the file
    comes before zeros, zeros before random values.
    """

    dtype: Any = option(None, "null: as the input is declared.", read=datatype_of, nullable=True)
    shape: Sequence[int] | None = option(
        None, "Without the batch axis; null: as the input is declared.", least=0
    )
    zero_data: bool = False
    random_data: bool = False
    file: str | None = option(
        None,
        "A file in place of values, relative to this file: .npy, or else the bytes of one sample as requests "
        "have them.",
        some=True,
        triton="input_data_file",
    )
    values: str | None = option(
        None, "What it is filled with: zero or random; null: random.", words=(ZERO, RANDOM)
    )


@dataclass
class ModelWarmup:
    """A batch that every instance runs before the model is ready."""

    name: str = required("Name in the log.", some=True)
    batch_size: int = option(1, "Rows; without effect where the model does not batch.", least=1)
    inputs: Mapping[str, WarmupInput] = option(
        {}, "Inputs by name; random values in those that are left out."
    )
    count: int = option(1, "How many times it runs.", least=1)


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


if TYPE_CHECKING:  # it has the same fields
    _Options = ModelOptions
else:
    _Options = changeable(ModelOptions)


@dataclass
class ModelConfig(_Options):
    """How a bound model is run.

    With ``batching=False`` the tensors' shapes are complete and every request is its own call.
    With ``batcher=None`` requests may carry a batch but are never merged. In place of the batcher,
    ``batching`` may be a ``Batching``, and ``queue`` a ``Queue``: with them options have the names that they
    have in a config file.
    ``decoupled`` models answer a request with any number of responses, each sent as it is produced.
    ``response_cache`` answers a request that was seen before from memory. ``sequence_batching`` says that
    requests belong to sequences, ``rate_limiter`` what each instance needs to run.
    All else, by keyword, is what a config file may say: ``array``, ``prefetch``, ``read_only_inputs``,
    ``retry_on_worker_death``, and whatever else ``ModelOptions`` has; described in docs/reference.md.
    """

    batching: bool | BatchingSpec = True
    max_batch_size: int = 4
    batcher: DynamicBatcher | None = field(default_factory=DynamicBatcher)
    response_cache: bool = False
    decoupled: bool = False
    model_warmup: Sequence[ModelWarmup] | None = None
    sequence_batching: SequenceBatching | None = None
    rate_limiter: RateLimiter | None = None
    queue: QueueSpec | None = None
    if TYPE_CHECKING:  # the options for which None stands for a default
        array: Literal["numpy", "cupy", "torch"] | None = field(default=None, kw_only=True)  # type: ignore[assignment]  # a spec has none
        prefetch: int | None = field(default=None, kw_only=True)  # type: ignore[assignment]  # as above
