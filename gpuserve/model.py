"""What a model is. ``Tensor``, ``ModelConfig`` and ``DynamicBatcher`` are what users write;
``ModelSpec`` is what all of them, and the config file, come to: the one description that the
supervisor, the front and (in part) the workers are given. No I/O here.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuserve.errors import BindError
from gpuserve_worker.tensor import TensorSpec, datatype_of

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
DEFAULT_MAX_QUEUE_REQUESTS = 4096
DEFAULT_MAX_QUEUE_NBYTES = 2 << 30


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


@dataclass(frozen=True)
class DynamicBatcher:
    """How requests are merged. Times in microseconds.

    A batch waits at most ``max_queue_delay_microseconds`` for one of ``preferred_batch_size``.
    """

    max_queue_delay_microseconds: int = 0
    preferred_batch_size: Sequence[int] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """How a bound model is run.

    With ``batching=False`` the tensors' shapes are complete and every request is its own call.
    With ``batcher=None`` requests may carry a batch but are never merged.
    """

    batching: bool = True
    max_batch_size: int = 4
    batcher: DynamicBatcher | None = field(default_factory=DynamicBatcher)


@dataclass(frozen=True, slots=True)
class BatchingSpec:
    """When a batch is formed; the semantics are Triton's dynamic batcher.

    ``merge=False``: every request is its own batch.
    """

    max_queue_delay_us: int = 0
    preferred_batch_sizes: tuple[int, ...] = ()
    merge: bool = True


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """How much may wait for a model before requests are refused."""

    max_requests: int = DEFAULT_MAX_QUEUE_REQUESTS
    max_nbytes: int = DEFAULT_MAX_QUEUE_NBYTES


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One worker process: its name, its device, and where its callable comes from (``wire.Init.source``)."""

    name: str
    device: str
    source: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model, complete. ``max_batch_size`` 0 means that the model does not batch.

    ``prefetch`` is how many batches may wait inside a worker besides the one that runs.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    instances: tuple[InstanceSpec, ...]
    version: int = 1
    batching: BatchingSpec = BatchingSpec()
    queue: QueueSpec = QueueSpec()
    prefetch: int = 0
    strict: bool = False
    read_only_inputs: bool = False
    retry_on_worker_death: bool = True

    def to_wire(self) -> dict[str, Any]:
        """The spec as plain data for another process, without the instances' callables."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["batching"] = dataclasses.astuple(self.batching)
        plain["queue"] = dataclasses.astuple(self.queue)
        plain["instances"] = [(one.name, one.device) for one in self.instances]
        return plain

    @classmethod
    def from_wire(cls, plain: dict[str, Any]) -> ModelSpec:
        """The inverse of ``to_wire``; the instances' sources are empty."""
        return cls(
            **{
                **plain,
                "inputs": tuple(TensorSpec(*one) for one in plain["inputs"]),
                "outputs": tuple(TensorSpec(*one) for one in plain["outputs"]),
                "batching": BatchingSpec(*plain["batching"]),
                "queue": QueueSpec(*plain["queue"]),
                "instances": tuple(InstanceSpec(n, d, {}) for n, d in plain["instances"]),
            }
        )


def check_model_name(name: object) -> str:
    """The name, if a model may have it.

    Raises:
        BindError: not a string, empty, too long, or with other characters than the allowed ones.
    """
    if not isinstance(name, str) or not name:
        raise BindError("Model name cannot be empty")
    if MODEL_NAME.fullmatch(name) is None:
        raise BindError(
            f"Model name {name[:140]!r} is not allowed: it can only contain alphanumeric characters, "
            "dots, underscores and dashes, starts with a letter or digit and has at most 128 characters"
        )
    return name


def tensor_specs(tensors: Sequence[Tensor], prefix: str) -> tuple[TensorSpec, ...]:
    """The declared tensors with names and v2 datatypes. ``prefix`` is INPUT or OUTPUT.

    Raises:
        BindError: no sequence of tensors, a bad name, dtype or shape, or two tensors of one name.
    """
    if not isinstance(tensors, Sequence) or not all(isinstance(one, Tensor) for one in tensors):
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
