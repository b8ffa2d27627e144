"""Ragged tensors of a batch: tensors whose shapes differ between the requests of the batch.

The elements of all requests lie one after the other, in memory of any array library. The views of single
requests and rows are made only for a reader that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve_worker.protocol.payloads import WireTensor
from gpuserve_worker.protocol.tensor import TensorSpec, element_count

Shape: TypeAlias = tuple[int, ...]
#: The variable axes of a tensor, counted without the batch axis.
Axes: TypeAlias = tuple[int, ...]


class RaggedNames(NamedTuple):
    """The ragged inputs and outputs of a model, each with its variable axes."""

    inputs: Mapping[str, Axes]
    outputs: Mapping[str, Axes]


NOTHING_RAGGED: Final = RaggedNames({}, {})


def ragged_names(inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> RaggedNames:
    """Return the declared ragged tensors of a model."""
    found = RaggedNames(_variable_axes(inputs), _variable_axes(outputs))
    return found if found.inputs or found.outputs else NOTHING_RAGGED


def _variable_axes(specs: Iterable[TensorSpec]) -> dict[str, Axes]:
    return {
        one.name: tuple([axis for axis, size in enumerate(one.shape) if size == -1])
        for one in specs
        if one.ragged
    }


class RaggedTensor(Sequence[Any]):
    """A ragged tensor of a batch: ``flat`` elements of all requests, ``shapes`` of each; arrays are views."""

    __slots__ = ("axes", "flat", "shapes")

    def __init__(self, flat: Any, shapes: Sequence[Shape], axes: Axes) -> None:
        self.flat = flat
        self.shapes = shapes
        self.axes = axes

    def __len__(self) -> int:
        return len(self.shapes)

    def __iter__(self) -> Iterator[Any]:
        start = 0
        for shape in self.shapes:
            end = start + element_count(shape)
            yield self.flat[start:end].reshape(shape)
            start = end

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            (only,) = self[index : index + 1 or None]
            return only
        start, stop, _ = index.indices(len(self.shapes))
        first = sum(map(element_count, self.shapes[:start]))
        chosen = self.shapes[start:stop]
        return RaggedTensor(self.flat[first : first + sum(map(element_count, chosen))], chosen, self.axes)

    def rows(self) -> list[Any]:
        """Return one array for each row of the batch, without the batch axis."""
        found, flat, start = [], self.flat, 0
        for count, *shape in self.shapes:
            size = element_count(shape)
            for _ in range(count):
                row = flat[start : start + size]
                found.append(row if len(shape) == 1 else row.reshape(shape))
                start += size
        return found


def split_ragged(tensors: Sequence[WireTensor]) -> tuple[tuple[WireTensor, ...], dict[str, list[Shape]]]:
    """Return tensors with flat shapes in place of ragged ones, and the request shapes of the ragged ones."""
    flat: list[WireTensor] = []
    shapes: dict[str, list[Shape]] = {}
    for name, datatype, shape, payload in tensors:
        if shape and not isinstance(shape[0], int):
            shapes[name] = [tuple(one) for one in shape]
            shape = (sum(map(element_count, shapes[name])),)
        flat.append(WireTensor(name, datatype, shape, payload))
    return tuple(flat), shapes
