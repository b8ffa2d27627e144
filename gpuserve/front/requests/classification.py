"""Classification of outputs: the largest elements as texts ``value:index`` or ``value:index:label``. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.requests.inference import InferResponse, OutputTensor
from gpuserve.front.requests.limits import shown
from gpuserve.model.spec import ModelSpec, StepSpec
from gpuserve_worker.protocol.tensor import BYTES, element_count, encode_bytes, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_ELEMENTS: Final = 1_000_000
_UNSUPPORTED: Final = frozenset({"BYTES", "BOOL", "FP16", "BF16"})
#: Returns the model of an ensemble's step, or None if it is not served any more.
Member: TypeAlias = Callable[[StepSpec], ModelSpec | None]


def classify(
    response: InferResponse, class_counts: Mapping[str, int], spec: ModelSpec, member: Member
) -> None:
    """Replace outputs by their classes. Raise InvalidArgument, with the response closed, on failure."""
    batched = spec.max_batch_size > 0
    try:
        response.outputs = [
            top_classes(one, class_counts[one.name], batched, labels_of(one.name, spec, member))
            if one.name in class_counts
            else one
            for one in response.outputs
        ]
    except InvalidArgument:
        response.close()
        raise


def labels_of(output: str, spec: ModelSpec, member: Member) -> Sequence[str]:
    """Return the labels of an output, for an ensemble without labels those of the producing model."""
    for one in spec.labels:
        if one.output == output:
            return one.labels
    for step in spec.steps:
        for theirs, ours in step.outputs:
            if ours == output:
                made_by = member(step)
                return () if made_by is None else labels_of(theirs, made_by, member)
    return ()


def top_classes(output: OutputTensor, count: int, batched: bool, labels: Sequence[str]) -> OutputTensor:
    """Return the ``count`` largest elements of each row, largest first, with shape [rows, k], or [k] without
    a batch.

    Equal elements keep their order; NaN is less than any number. Raises InvalidArgument if the datatype has
    no order or there are too many elements."""
    values = _values(output)
    batched = batched and bool(output.shape)  # an unchecked output may be a single element
    rows, inner = (output.shape[0], output.shape[1:]) if batched else (1, output.shape)
    by_row = values.reshape(rows, element_count(inner))
    k = min(count, by_row.shape[1])
    texts = [text for row in by_row for text in _row_classes(row, k, labels)]
    return OutputTensor(output.name, BYTES, (rows, k) if batched else (k,), encode_bytes(texts))


def _values(output: OutputTensor) -> NDArray[Any]:
    if output.datatype in _UNSUPPORTED:
        raise InvalidArgument(
            f"class result not available for output due to unsupported type '{output.datatype}' "
            f"of output '{shown(output.name)}'"
        )
    if element_count(output.shape) > MAX_ELEMENTS:
        raise InvalidArgument(
            f"classification output tensor too large: expected at most {MAX_ELEMENTS} elements, "
            f"output '{shown(output.name)}' has {element_count(output.shape)}"
        )
    return np.frombuffer(output.data, dtype=numpy_dtype(output.datatype))


def _row_classes(row: NDArray[Any], k: int, labels: Sequence[str]) -> list[str]:
    texts = []
    for index in _largest(row, k):
        value = row[index].item()
        text = f"{value:f}:{index}" if isinstance(value, float) else f"{value}:{index}"
        texts.append(f"{text}:{labels[index]}" if index < len(labels) else text)
    return texts


def _largest(row: NDArray[Any], k: int) -> list[int]:
    """Return the positions of the ``k`` largest elements, largest first."""
    if not k:
        return []
    keys = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
    least = np.partition(keys, len(keys) - k)[len(keys) - k]
    certain = np.flatnonzero(keys > least)
    tied = np.flatnonzero(keys == least)[: k - len(certain)]
    chosen = np.sort(np.concatenate([certain, tied]))
    order = np.argsort(keys[chosen][::-1], kind="stable")[
        ::-1
    ]  # reversed twice, so that the first of equal elements leads
    found: list[int] = chosen[len(chosen) - 1 - order].tolist()
    return found
