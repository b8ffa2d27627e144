"""The tensors of a model: from ``Tensor`` to ``TensorSpec`` and ``LabelSpec``; what kind of array a callable
is given, and where its inputs are to lie, where users leave that out. Pure.

==========  ====================  =========================================
``array``   ``memory`` of inputs  they come as
==========  ====================  =========================================
None        None                  numpy arrays
None        "gpu" for some        those as CuPy arrays, the others of numpy
"cupy"      None                  CuPy arrays on the GPU
"torch"     None                  torch tensors on the GPU
any         "cpu"                 on the host: of torch if ``array`` is, otherwise of numpy
==========  ====================  =========================================
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gpuserve.declare.model import CPU, GPU, MEMORIES, Tensor
from gpuserve.declare.spec import CUPY, NUMPY, TORCH, LabelSpec
from gpuserve.devices import names
from gpuserve.errors import BindError
from gpuserve_worker.protocol.tensor import BYTES, TensorSpec, datatype_of

#: As many elements can be classified.
MAX_LABELS: Final = 1_000_000


def memory_problem(memory: Any, datatype: str, array: str | None) -> str | None:
    """What is wrong with the ``memory`` of an input of a model with this ``array``; None where nothing is."""
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
    """What is wrong with the devices of a model whose inputs come as this kind of array; None for nothing."""
    if array != CUPY or names.CPU not in devices:
        return None
    return (
        "CuPy arrays as inputs need a GPU: expected device 'cuda:0', 'cuda:*', … for every instance, or else "
        f"array 'torch', given {names.CPU!r}"
    )


def array_of(array: str | None, memories: Iterable[str | None]) -> str:
    return array or (CUPY if GPU in memories else NUMPY)


def memory_of(memory: str | None, datatype: str, array: str | None) -> str:
    if memory is not None:
        return memory
    return GPU if array in {CUPY, TORCH} and datatype != BYTES else CPU


# ---- tensors of a program ------------------------------------------------------------------------


def tensor_specs(tensors: Sequence[Tensor], prefix: str, array: str | None = None) -> tuple[TensorSpec, ...]:
    """The declared tensors with names and v2 datatypes. ``prefix`` is INPUT or OUTPUT, ``array`` the model's.
    Raises BindError: no sequence of tensors, a bad name, dtype, shape or memory, or two tensors of one name.
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
    declared = inputs if isinstance(inputs, Sequence) else ()  # ``tensor_specs`` refuses what is no tensor
    return array_of(array, [one.memory for one in declared if isinstance(one, Tensor)])


def _tensor_spec(tensor: Tensor, default_name: str, array: str | None) -> TensorSpec:
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
    problem = memory_problem(tensor.memory, datatype, array)
    if problem is not None:
        raise BindError(f"Tensor {name!r}: {problem}")
    memory = memory_of(tensor.memory, datatype, array)
    return TensorSpec(name, datatype, shape, bool(tensor.optional), memory)


# ---- labels -------------------------------------------------------------------------------------


def labels_from(given: Any) -> tuple[str, ...]:
    """Labels as a program gives them. Raises ValueError: they are no texts, or too many."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"labels must be a list of texts, got {given!r:.100}")
    if len(given) > MAX_LABELS:
        raise ValueError(f"expected at most {MAX_LABELS} labels, got {len(given)}")
    for position, label in enumerate(given):
        if not isinstance(label, str):
            raise ValueError(f"labels must be texts, but label {position} is {label!r:.100}")
    return tuple(given)


def labels_in(text: str) -> tuple[str, ...]:
    """The labels in the text of a file: one a line, an end of line at the very end is none. Raises
    ValueError: too many.
    """
    return labels_from(text.splitlines())


def label_specs(outputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> tuple[LabelSpec, ...]:
    """The labels of the outputs that have any; ``specs`` is what ``tensor_specs`` made of them. Raises
    BindError: they are no list of texts.
    """
    found = []
    for tensor, spec in zip(outputs, specs, strict=True):
        if tensor.labels is None:
            continue
        try:
            found.append(LabelSpec(spec.name, labels_from(tensor.labels)))
        except ValueError as error:
            raise BindError(f"Tensor {spec.name!r}: {error}") from None
    return tuple(found)
