"""Triton's ``batch_input`` and ``batch_output``: inputs that describe the requests of a batch to its model,
and outputs that are cut apart by the shapes of an input.

A runtime receives a ragged input as one array with one axis, the elements of all requests, and each value
below joined over the requests. A model.py receives its requests apart, each with its own values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpuserve.decorators.ragged import join_ragged
from gpuserve_worker.inference.inference_request import Batch, RequestBatch
from gpuserve_worker.inference.ragged import RaggedTensor, Shape
from gpuserve_worker.protocol.tensor import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The kind of a ``batch_input`` that names none: the first value of the enumeration.
_FIRST_KIND: Final = "BATCH_ELEMENT_COUNT"


class BatchInput(NamedTuple):
    """An input that the server makes from the shapes of ``source`` in all requests of a batch."""

    kind: str
    name: str
    datatype: str
    source: str

    def values(self, shapes: Sequence[Shape]) -> list[NDArray[Any]]:
        """Return the value for each request; ``shapes`` are those of the source, with the batch axis."""
        made = KINDS[self.kind](shapes)
        dtype = numpy_dtype(self.datatype)
        return [np.asarray(one, dtype) for one in made]


class BatchOutput(NamedTuple):
    """An output of one axis that is cut by the shapes of ``source``. A size of -1 in ``shape``, which
    includes the batch axis, is that of the same axis of the source.
    """

    name: str
    source: str
    shape: tuple[int, ...]

    def cut(self, value: Any, shapes: Sequence[Shape]) -> list[Any]:
        """Return the part of each request; raise ValueError if the output has another number of elements."""
        wanted = [tuple([_size(*one, shape) for one in enumerate(self.shape)]) for shape in shapes]
        ends = list(itertools.accumulate(map(math.prod, wanted)))
        given = math.prod(value.shape)
        if given != ends[-1]:
            raise ValueError(
                f"output {self.name!r} has {given} elements, but the shapes of input {self.source!r} need "
                f"{ends[-1]}"
            )
        flat = value[:].reshape(-1)
        places = zip((0, *ends), ends, wanted, strict=False)
        return [flat[start:end].reshape(shape) for start, end, shape in places]


def _size(axis: int, declared: int, source: Shape) -> int:
    return declared if declared >= 0 or axis >= len(source) else source[axis]


def _accumulated(shapes: Sequence[Shape]) -> list[Any]:
    return [[total] for total in itertools.accumulate(map(math.prod, shapes))]


#: The values of each request by the kind in config.pbtxt.
KINDS: Final[Mapping[str, Callable[[Sequence[Shape]], list[Any]]]] = {
    "BATCH_ELEMENT_COUNT": lambda shapes: [[math.prod(shape)] for shape in shapes],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: [
        [*([] if number else [0]), *total] for number, total in enumerate(_accumulated(shapes))
    ],
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: [
        np.zeros(max(map(math.prod, shapes))),
        *[np.zeros(0) for _ in shapes[1:]],
    ],
    "BATCH_ITEM_SHAPE": lambda shapes: [[shape[1:]] * shape[0] for shape in shapes],
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: [list(shape[1:]) * shape[0] for shape in shapes],
}


class BatchTensors:
    """The batch inputs and outputs of one model, by the fields of ``BatchInput`` and ``BatchOutput``."""

    def __init__(self, inputs: Sequence[Sequence[Any]], outputs: Sequence[Sequence[Any]]) -> None:
        self._inputs = [BatchInput(*one) for one in inputs]
        self._outputs = {one[0]: BatchOutput(one[0], one[1], tuple(one[2])) for one in outputs}

    def run(self, requests: Any, run: Callable[[dict[str, Any]], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the outputs of each request of a ``Batch`` or list, from one ``run`` of a runtime, which
        maps arrays by input name to outputs by name.
        """
        batch = requests if isinstance(requests, Batch) else join_ragged(requests, None)
        arrays = {
            name: one.flat if isinstance(one, RaggedTensor) else one for name, one in batch.arrays.items()
        }
        for one in self._inputs:
            arrays[one.name] = np.concatenate(one.values(_shapes(batch, one.source)))
        answers: list[dict[str, Any]] = [{} for _ in batch.rows]
        for name, value in run(arrays).items():
            if name in self._outputs:
                source = self._outputs[name].source
                parts = self._outputs[name].cut(value, _shapes(batch, source))
            else:
                ends = list(itertools.accumulate(batch.rows))
                parts = [value[start:end] for start, end in zip((0, *ends), ends, strict=False)]
            for answer, part in zip(answers, parts, strict=True):
                answer[name] = part
        return answers

    def add_inputs(self, requests: RequestBatch) -> RequestBatch:
        """Return the same requests, each with its own values of the batch inputs."""
        data = [dict(request.data) for request in requests]
        for one in self._inputs:
            values = one.values([request[one.source].shape for request in requests])
            for own, value in zip(data, values, strict=True):
                own[one.name] = value
        made = [request.with_data(own) for request, own in zip(requests, data, strict=True)]
        return RequestBatch(made, requests.output_names, requests.batching, requests.ragged)


def batch_tensors_in(config: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """Return the arguments of ``BatchTensors`` in a ``ModelConfig`` as plain data; {} if there are none."""
    rows = (-1,) if config.get("max_batch_size", 0) else ()
    dims = {one["name"]: [*rows, *map(int, one.get("dims", ()))] for one in config.get("output", ())}
    inputs = [
        [one.get("kind") or _FIRST_KIND, name, one["data_type"].removeprefix("TYPE_"), one["source_input"][0]]
        for one in config.get("batch_input", ())
        for name in one["target_name"]
    ]
    outputs = [
        [name, one["source_input"][0], dims[name]]
        for one in config.get("batch_output", ())
        for name in one["target_name"]
    ]
    return {"inputs": inputs, "outputs": outputs} if inputs or outputs else {}


def _shapes(batch: Batch, name: str) -> list[Shape]:
    array = batch.arrays[name]
    if isinstance(array, RaggedTensor):
        return list(array.shapes)
    return [(count, *array.shape[1:]) for count in batch.rows]
