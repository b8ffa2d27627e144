"""The classes by which programs declare a model, and the tensors of a model.

The classes have PyTriton's names and defaults where PyTriton has the class. As in PyTriton, all of them
except ``Tensor`` may be changed until the model is bound. ``build.py`` turns them into a ``ModelSpec``.

The kind of array that a callable receives, and the memory of its inputs, if a declaration leaves them out:

==========  ====================  =========================================
``array``   ``memory`` of inputs  inputs are
==========  ====================  =========================================
None        None                  numpy arrays
None        "gpu" for some        those CuPy arrays, the others numpy arrays
"cupy"      None                  CuPy arrays on the GPU
"torch"     None                  torch tensors on the GPU
any         "cpu"                 on the host: torch if ``array`` is "torch", otherwise numpy
==========  ====================  =========================================
"""

from __future__ import annotations

import enum
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from gpuserve.core.errors import BindError
from gpuserve.core.suggestions import explained
from gpuserve.devices import names
from gpuserve.model.options import mutable_options, option, required, spelled
from gpuserve.model.spec import (
    CUPY,
    NUMPY,
    TORCH,
    BatchingSpec,
    LabelSpec,
    ModelOptions,
    QueueSpec,
    RateLimiter,
    SequenceBatching,
)
from gpuserve_worker.protocol.tensor import BYTES, TensorSpec, datatype_of

#: Values of ``memory`` of an input.
CPU: Final = "cpu"
GPU: Final = "gpu"
MEMORIES: Final = (CPU, GPU)
#: Sources of warm-up values.
ZERO: Final = "zero"
RANDOM: Final = "random"
FILE: Final = "file"


def json_schema(text: Any) -> str:
    """Return the text of a JSON object; raise ValueError for anything else."""
    try:
        is_object = isinstance(text, str) and isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ValueError(f"schema must be the text of a JSON object, given {text!r:.100}")
    return str(text)


@explained
@dataclass(frozen=True)
class Tensor:
    """One input or output of a model. Tensors without a name are INPUT_1…, OUTPUT_1… by position.

    Only inputs may be optional or have a ``memory``, "gpu" or "cpu"; only outputs may have labels. The
    requests of one batch may have different shapes of a ``ragged`` tensor.
    """

    # fmt: off
    shape: tuple[int, ...] = required("Shape without the batch axis if the model batches; -1 is any size.",
        least=-1, examples=([-1],))
    dtype: Any = required('A numpy name (float32), a v2 name (FP32), or "bytes".', read=datatype_of,
        examples=("float32", "FP32", "bytes"))
    name: str | None = option(None, "Name of the tensor.", some=True, needed=True)
    optional: bool | None = option(False, "Whether a request may leave this input out.")
    labels: Sequence[str] | None = option(None,
        "Class names, by position, for requests that ask for classification.")
    memory: Literal["gpu", "cpu"] | None = option(None,
        "Memory of the array that the callable receives: gpu, of the instance, or cpu; null: determined by "
        "array.", words=MEMORIES)
    ragged: bool | None = option(False,
        "Whether the requests of one batch may differ in the sizes that are -1. The callable receives such "
        "an input as a list, or padded by @batch(pad=…).", triton="allow_ragged_batch")
    schema: str | None = option(None,
        "JSON Schema of an element of a BYTES tensor, as JSON text, for the OpenAPI document. Elements are "
        "not checked by it.", read=json_schema)
    # fmt: on


class TimeoutAction(enum.Enum):
    """The action when the queue timeout of a request expires."""

    REJECT = "REJECT"  #: The request is refused.
    DELAY = "DELAY"  #: All other requests of the same priority are dequeued first.


@explained
@dataclass
class QueuePolicy:
    """The queue policy of a priority level: times in microseconds and numbers of requests; 0 is no limit.

    With ``allow_timeout_override`` a request's own parameter ``timeout`` may shorten the timeout.
    """

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@explained
@dataclass
class DynamicBatcher:
    """The batching options and the queue policies of a model, under PyTriton's names. Times in microseconds.

    A batch waits at most ``max_queue_delay_microseconds`` for one of ``preferred_batch_size``. With
    ``priority_levels`` requests carry a priority level from 1, which is dequeued first, to that number; a
    request without a level has ``default_priority_level``. ``priority_queue_policy`` replaces
    ``default_queue_policy`` for single levels.
    """

    max_queue_delay_microseconds: int = 0
    preferred_batch_size: Sequence[int] | None = None
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: Mapping[int, QueuePolicy] | None = None


@spelled
@explained
@dataclass
class WarmupInput:
    """One input of a warm-up request: zeros, random values, or a ``.npy`` file.

    ``zero_data`` and ``random_data`` are PyTriton's form of ``values``. If several are given, the file takes
    precedence over zeros, and zeros over random values.
    """

    # fmt: off
    dtype: Any = option(None,
        "Dtype of the values; null: the declared dtype.", read=datatype_of, nullable=True)
    shape: Sequence[int] | None = option(None,
        "Shape without the batch axis; null: the declared shape.", least=0)
    zero_data: bool = False
    random_data: bool = False
    file: str | None = option(None,
        "File in place of values, relative to this file: .npy, or else the bytes of one sample in the form "
        "of requests.", some=True, triton="input_data_file")
    values: str | None = option(None, "Values: zero or random; null: random.", words=(ZERO, RANDOM))
    # fmt: on


@explained
@dataclass
class ModelWarmup:
    """A warm-up batch, which every instance runs before the model is ready."""

    name: str = required("Name in the log.", some=True)
    batch_size: int = option(1, "Number of rows; without effect if the model does not batch.", least=1)
    inputs: Mapping[str, WarmupInput] = option(
        {}, "Inputs by name; random values in inputs that are left out."
    )
    count: int = option(1, "Number of runs.", least=1)


@explained
@dataclass(frozen=True)
class Step:
    """One step of an ensemble, an argument of ``Server.ensemble()``. ``inputs`` and ``outputs`` name the
    ensemble's tensor for each input and each used output of the model. ``version`` None is the latest at the
    time of a request.
    """

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    version: int | None = None


if TYPE_CHECKING:  # both classes have the same fields
    _Options = ModelOptions
else:
    _Options = mutable_options(ModelOptions)


@partial(explained, batcher=DynamicBatcher)
@dataclass
class ModelConfig(_Options):
    """The options of a bound model.

    With ``batching=False`` the tensors' shapes are complete and every request is its own call. With
    ``batcher=None`` requests may carry a batch but are never merged. In place of the batcher, ``batching``
    may be a ``Batching``, and ``queue`` a ``Queue``: with these classes, options have the names of the config
    file. ``decoupled`` models answer a request with any number of responses, each sent as soon as it is
    produced. ``response_cache`` answers repeated requests from memory. ``sequence_batching`` declares that
    requests belong to sequences, ``rate_limiter`` the resources that each instance needs while it executes.
    All other options of a config file are keyword arguments: ``array``, ``prefetch``, ``read_only_inputs``,
    ``retry_on_worker_death``, and the rest of ``ModelOptions``, described in docs/reference.md.
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


MAX_LABELS: Final = 1_000_000


def memory_problem(memory: Any, datatype: str, array: str | None) -> str | None:
    """Return the error in the ``memory`` of an input of a model with this ``array``, or None."""
    if memory is not None and memory not in MEMORIES:
        return f"memory must be 'cpu', 'gpu' or None, got {memory!r:.100}"
    if memory != GPU:
        return None
    if datatype == BYTES:
        return "memory must be 'cpu': byte strings stay on the host"
    if array == NUMPY:
        return "memory 'gpu' needs array 'cupy' or 'torch': numpy arrays are on the host"
    return None


def device_problem(array: str, devices: Iterable[str]) -> str | None:
    """Return why a model whose inputs are this kind of array cannot run on the devices, or None."""
    if array != CUPY or names.CPU not in devices:
        return None
    return (
        "CuPy arrays as inputs need a GPU: expected device 'cuda:0', 'cuda:*', … for every instance, or else "
        f"array 'torch', given {names.CPU!r}"
    )


def array_library(array: str | None, memories: Iterable[str | None]) -> str:
    return array or (CUPY if GPU in memories else NUMPY)


def input_memory(memory: str | None, datatype: str, array: str | None) -> str:
    if memory is not None:
        return memory
    return GPU if array in {CUPY, TORCH} and datatype != BYTES else CPU


def tensor_specs(tensors: Sequence[Tensor], prefix: str, array: str | None = None) -> tuple[TensorSpec, ...]:
    """Return declared tensors as specs; ``prefix`` names them, ``array`` is that of the model; raise
    BindError.
    """
    is_list = isinstance(tensors, Sequence) and not isinstance(tensors, str | bytes)
    if not is_list or not all(isinstance(one, Tensor) for one in tensors):
        raise BindError(f"{prefix.lower()}s must be a list of Tensor, got {tensors!r:.200}")
    specs: list[TensorSpec] = []
    for position, tensor in enumerate(tensors, 1):
        spec = _tensor_spec(tensor, f"{prefix}_{position}", array if prefix == "INPUT" else None)
        if any(spec.name == earlier.name for earlier in specs):
            raise BindError(f"Tensor {spec.name!r} is declared twice")
        if prefix == "OUTPUT" and spec.optional:
            raise BindError(f"Tensor {spec.name!r}: output tensors cannot be optional")
        if prefix == "INPUT" and tensor.labels is not None:
            raise BindError(f"Tensor {spec.name!r}: only output tensors have labels")
        if prefix == "OUTPUT" and tensor.memory is not None:
            raise BindError(f"Tensor {spec.name!r}: only inputs have a memory; outputs may be anywhere")
        specs.append(spec)
    return tuple(specs)


def array_kind(array: str | None, inputs: Sequence[Tensor]) -> str:
    declared = inputs if isinstance(inputs, Sequence) else ()  # ``tensor_specs`` refuses all other values
    return array_library(array, [one.memory for one in declared if isinstance(one, Tensor)])


def _tensor_spec(tensor: Tensor, default_name: str, array: str | None) -> TensorSpec:
    name = default_name if tensor.name is None else tensor.name
    if not isinstance(name, str) or not name:
        raise BindError(f"Tensor {default_name}: name must be a non-empty string, got {name!r}")
    try:
        datatype = datatype_of(tensor.dtype)
        try:
            shape = tuple(operator.index(dim) for dim in tensor.shape)
        except TypeError:
            shape = (-2,)
        if any(dim < -1 for dim in shape):
            expected = "a tuple of integers of at least 0, or -1 for any size"
            raise ValueError(f"shape must be {expected}, got {tensor.shape!r}")
        if problem := memory_problem(tensor.memory, datatype, array):
            raise ValueError(problem)
        schema = "" if tensor.schema is None else json_schema(tensor.schema)
    except ValueError as error:
        raise BindError(f"Tensor {name!r}: {error}") from None
    memory = input_memory(tensor.memory, datatype, array)
    return TensorSpec(name, datatype, shape, bool(tensor.optional), memory, bool(tensor.ragged), schema)


def labels_from(given: Any) -> tuple[str, ...]:
    """Return the labels that a program gives; raise ValueError if they are no texts, or too many."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"labels must be a list of texts, got {given!r:.100}")
    if len(given) > MAX_LABELS:
        raise ValueError(f"expected at most {MAX_LABELS} labels, got {len(given)}")
    for position, label in enumerate(given):
        if not isinstance(label, str):
            raise ValueError(f"labels must be texts, but label {position} is {label!r:.100}")
    return tuple(given)


def label_specs(outputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> tuple[LabelSpec, ...]:
    """Return the labels of the outputs, whose ``tensor_specs`` are ``specs``; raise BindError."""
    found = []
    for tensor, spec in zip(outputs, specs, strict=True):
        if tensor.labels is None:
            continue
        try:
            found.append(LabelSpec(spec.name, labels_from(tensor.labels)))
        except ValueError as error:
            raise BindError(f"Tensor {spec.name!r}: {error}") from None
    return tuple(found)
