"""What users write to declare a model: ``Tensor``, ``ModelConfig`` and its parts. The names and the
defaults are PyTriton's, and as there all but ``Tensor`` may be changed until they are bound. What they come
to is ``spec.ModelSpec``; no I/O here.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuserve.errors import BindError
from gpuserve_worker.tensor import TensorSpec, datatype_of


@dataclass(frozen=True)
class Tensor:
    """One input or output of a model, as ``bind()`` takes it.

    Args:
        shape: without the batch axis where the model batches; -1 is any size.
        dtype: a numpy dtype, a scalar type, or a string: "float32", "FP32", "bytes".
        name: INPUT_1…, OUTPUT_1… by position when left out.
        optional: a request may leave this input out.
    """

    shape: tuple[int, ...]
    dtype: Any
    name: str | None = None
    optional: bool | None = False


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
class ModelConfig:
    """How a bound model is run.

    With ``batching=False`` the tensors' shapes are complete and every request is its own call.
    With ``batcher=None`` requests may carry a batch but are never merged.
    ``decoupled`` models answer a request with any number of responses, each sent as it is produced.
    ``response_cache`` answers a request that was seen before from memory.
    """

    batching: bool = True
    max_batch_size: int = 4
    batcher: DynamicBatcher | None = field(default_factory=DynamicBatcher)
    response_cache: bool = False
    decoupled: bool = False
    model_warmup: Sequence[ModelWarmup] | None = None


def tensor_specs(tensors: Sequence[Tensor], prefix: str) -> tuple[TensorSpec, ...]:
    """The declared tensors with names and v2 datatypes. ``prefix`` is INPUT or OUTPUT.

    Raises:
        BindError: no sequence of tensors, a bad name, dtype or shape, or two tensors of one name.
    """
    is_list = isinstance(tensors, Sequence) and not isinstance(tensors, str | bytes)
    if not is_list or not all(isinstance(one, Tensor) for one in tensors):
        raise BindError(f"{prefix.lower()}s must be a list of Tensor, got {tensors!r:.200}")
    specs: list[TensorSpec] = []
    for position, tensor in enumerate(tensors, 1):
        spec = _tensor_spec(tensor, f"{prefix}_{position}")
        if any(spec.name == earlier.name for earlier in specs):
            raise BindError(f"Tensor {spec.name!r} is declared twice")
        if prefix == "OUTPUT" and spec.optional:
            raise BindError(f"Tensor {spec.name!r}: output tensors cannot be optional")
        specs.append(spec)
    return tuple(specs)


def _tensor_spec(tensor: Tensor, default_name: str) -> TensorSpec:
    name = default_name if tensor.name is None else tensor.name
    if not isinstance(name, str) or not name:
        raise BindError(f"Tensor {default_name}: name must be a non-empty string, got {name!r}")
    try:
        datatype = datatype_of(tensor.dtype)
    except ValueError as error:
        raise BindError(f"Tensor {name!r}: {error}") from None
    try:
        shape = tuple(operator.index(dim) for dim in tensor.shape)
    except TypeError:
        shape = (-2,)
    if any(dim < -1 for dim in shape):
        raise BindError(
            f"Tensor {name!r}: shape must be a tuple of integers of at least 0, or -1 for any size, "
            f"got {tensor.shape!r}"
        )
    return TensorSpec(name, datatype, shape, bool(tensor.optional))
