"""Ragged inputs under ``@batch``, as one array for each row, or as one padded array and its lengths; and the
outputs of each request, cut out of what the function returned.

Padding costs one copy of each row. Rows that have one shape already are not copied.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from gpuserve.decorators.batch_data import (
    concatenated,
    data_of,
    is_batching,
    join_data,
    join_requests,
    library_of,
    row_count,
    shape_of,
)
from gpuserve.decorators.wrapping import BatchError, RequestError, RowLengths
from gpuserve_worker.inference.inference_request import Batch, BatchedOutputs
from gpuserve_worker.inference.ragged import NOTHING_RAGGED, Axes, RaggedNames, RaggedTensor, Shape
from gpuserve_worker.protocol.payloads import WireRequest
from gpuserve_worker.protocol.tensor import element_count

_RIGHT: Final = "right"
#: Kinds of numpy's numbers, and of those of ml_dtypes.
_NUMERIC: Final = "biufV"


class Padding(NamedTuple):
    """The padding of ragged inputs, as the arguments of ``batch`` say. Byte strings are padded by empty ones
    if ``value`` is a number.
    """

    value: Any = 0
    lengths: str | Mapping[str, str] | None = None
    side: str = _RIGHT
    multiple_of: int = 1
    max_length: int | None = None
    dtype: Any = None

    def check(self) -> None:
        """Raise TypeError if a value is wrong."""
        names = self.lengths.values() if isinstance(self.lengths, Mapping) else [self.lengths or "x"]
        if not all(isinstance(one, str) and one.isidentifier() for one in names):
            raise TypeError(
                "lengths of @batch must be the name of an argument, or such names by input, "
                f"got {self.lengths!r:.100}"
            )
        if self.side not in (_RIGHT, "left"):
            raise TypeError(f"side of @batch must be 'right' or 'left', got {self.side!r:.100}")
        for name, number in (("pad_to_multiple_of", self.multiple_of), ("max_length", self.max_length or 1)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise TypeError(f"{name} of @batch must be an integer of at least 1, got {number!r:.100}")

    def size(self, longest: int) -> int:
        """Return the padded size of an axis whose longest row has this size."""
        size = -(-longest // self.multiple_of) * self.multiple_of
        return size if self.max_length is None else max(longest, min(size, self.max_length))

    def lengths_argument(self, name: str, *, is_first: bool) -> str | None:
        if isinstance(self.lengths, Mapping):
            return self.lengths.get(name)
        return self.lengths if is_first else None


class Lengths(NamedTuple):
    """The sizes of rows of a padded input on its variable axes, ``[rows, axes]``, and the padded sizes."""

    sizes: Any
    padded: Shape
    side: str
    is_longer: bool


NO_LENGTHS: Final[Sequence[Lengths]] = ()


def arguments(batch: Batch, padding: Padding | None) -> tuple[dict[str, Any], Sequence[Lengths]]:
    """Return the keyword arguments for a batch with ragged inputs, and the lengths of padded inputs.

    Without padding, a ragged input is a list with one array for each row.
    """
    given: dict[str, Any] = {}
    found: list[Lengths] = []
    for name, array in batch.arrays.items():
        if not isinstance(array, RaggedTensor):
            given[name] = array
        elif padding is None:
            given[name] = array.rows()
        else:
            given[name], lengths = padded(array, padding)
            found.append(lengths)
            argument = padding.lengths_argument(name, is_first=len(found) == 1)
            if argument is not None:
                sizes = lengths.sizes[:, 0] if lengths.sizes.shape[1] == 1 else lengths.sizes
                given[argument] = sizes.view(RowLengths)
    return given, found


def refusals(batch: Batch, padding: Padding | None) -> list[RequestError | None]:
    """Return each request's error if an input exceeds ``max_length``, or None; () if none is refused."""
    max_length = None if padding is None else padding.max_length
    if max_length is None:
        return []
    found: list[RequestError | None] = [None] * len(batch.requests)
    for name, array in batch.arrays.items():
        if not isinstance(array, RaggedTensor):
            continue
        for position, shape in enumerate(array.shapes):
            longest = max([shape[axis + 1] for axis in array.axes], default=0)
            if longest > max_length:
                found[position] = RequestError(
                    f"input {name!r} has the length {longest}, expected at most {max_length}"
                )
    return found if any(found) else []


def join_ragged(requests: Any, padding: Padding | None) -> Batch:
    """Return a list of requests as one batch, which may have ragged inputs; raise BatchError. Outside a
    server, the padded inputs are those that ``lengths`` names, or those whose shapes differ, or the first.
    """
    ragged: RaggedNames = getattr(requests, "ragged", NOTHING_RAGGED)
    axes: Mapping[str, Axes | None] = ragged.inputs
    if padding is None and not axes:
        return join_requests(requests, "@batch")
    data = [data_of(one) for one in requests]
    if not axes and padding is not None and data:
        given = padding.lengths if isinstance(padding.lengths, Mapping) else ()
        differ = [
            name for name in data[0] if len({tuple(shape_of(one.get(name, ())))[1:] for one in data}) > 1
        ]
        axes = dict.fromkeys(given or differ or (list(data[0])[:1] if padding.lengths else ()))
        if not axes:
            return join_requests(requests, "@batch")
    alike = join_data([{name: one[name] for name in one if name not in axes} for one in data])
    arrays = {}
    for name in data[0] if data else ():
        if name not in axes:
            arrays[name] = alike[name]
            continue
        if any(name not in one for one in data):
            raise BatchError(f"Cannot batch requests of which some have no input {name!r}")
        arrays[name] = ragged_input(name, [one[name] for one in data], axes[name])
    known = {name: one.axes for name, one in arrays.items() if isinstance(one, RaggedTensor)}
    wire = [WireRequest(row_count(one), {}, ()) for one in data]
    output_names = tuple(getattr(requests, "output_names", ()))
    return Batch(arrays, wire, output_names, is_batching(requests), RaggedNames(known, ragged.outputs))


def ragged_input(name: str, arrays: Sequence[Any], axes: Axes | None) -> RaggedTensor:
    """Return the arrays ``[rows, …]`` of requests as a ragged input; by default, axes that differ vary. Raise
    BatchError for other numbers of axes.
    """
    shapes = [tuple(one.shape) for one in arrays]
    inner = [shape[1:] for shape in shapes]
    if len({len(one) for one in inner}) != 1 or not inner[0]:
        raise BatchError(
            f"Cannot pad input {name!r} with the shapes {' and '.join(sorted(set(map(str, shapes))))}: "
            "expected the same number of axes, and at least one besides the batch axis"
        )
    if axes is None:
        sizes = zip(*inner, strict=True)
        axes = tuple([axis for axis, found in enumerate(sizes) if len(set(found)) > 1]) or (0,)
    return RaggedTensor(concatenated([one.reshape(-1) for one in arrays]), shapes, axes)


def padded(given: RaggedTensor, padding: Padding) -> tuple[Any, Lengths]:
    """Return the rows of an input as one padded array ``[rows, …]``, and their lengths."""
    axes = given.axes
    columns = [[shape[axis + 1] for shape in given.shapes] for axis in axes]
    counts = [shape[0] for shape in given.shapes]
    if sum(counts) > len(counts):  # a request has several rows
        columns = [
            [size for size, count in zip(column, counts, strict=True) for _ in range(count)]
            for column in columns
        ]
    target = list(given.shapes[0][1:])
    for axis, column in zip(axes, columns, strict=True):
        target[axis] = padding.size(max(column))
    sizes = np.array(columns, np.int64).T
    is_longer = any(min(column) < target[axis] for axis, column in zip(axes, columns, strict=True))
    lengths = Lengths(sizes, tuple([target[axis] for axis in axes]), padding.side, is_longer)
    flat = given.flat
    if padding.dtype is None:
        if not is_longer:
            return flat.reshape((len(columns[0]), *target)), lengths
        if axes == (0,) and isinstance(flat, np.ndarray) and flat.dtype.kind != "O":
            return _joined_rows(flat, columns[0], target, padding), lengths
    return _assigned_rows(given, target, padding), lengths


def _joined_rows(flat: Any, row_lengths: Sequence[int], target: Sequence[int], padding: Padding) -> Any:
    """Return padded rows of variable first axis, as copies of byte ranges, which are faster than arrays."""
    step = element_count(target[1:]) * flat.dtype.itemsize
    shape = (len(row_lengths), *target)
    whole = np.full(shape, padding.value, flat.dtype) if padding.value else np.zeros(shape, flat.dtype)
    memory, source = whole.reshape(-1).view(np.uint8).data, flat.view(np.uint8).data
    start = at = 0
    for length in row_lengths:
        nbytes = length * step
        to = at if padding.side == _RIGHT else at + target[0] * step - nbytes
        memory[to : to + nbytes] = source[start : start + nbytes]
        start += nbytes
        at += target[0] * step
    return whole


def _assigned_rows(given: RaggedTensor, target: Sequence[int], padding: Padding) -> Any:
    """Return padded rows of any library and with any variable axes."""
    flat, library, rows = given.flat, library_of(given.flat), given.rows()
    if library == "numpy":
        dtype = flat.dtype if padding.dtype is None else np.dtype(padding.dtype)
        value = b"" if dtype.kind == "O" and isinstance(padding.value, int | float) else padding.value
        whole: Any = np.full((len(rows), *target), value, dtype)
    else:
        place = {"device": flat.device} if library == "torch" else {}
        dtype = flat.dtype if padding.dtype is None else padding.dtype
        whole = sys.modules[library].full((len(rows), *target), padding.value, dtype=dtype, **place)
    for number, row in enumerate(rows):
        if padding.side == _RIGHT:
            part = tuple([slice(size) for size in row.shape])
        else:
            part = tuple([slice(end - size, end) for size, end in zip(row.shape, target, strict=True)])
        whole[(number, *part)] = row
    return whole


def cut_outputs(
    outputs: Mapping[str, Any], rows: Sequence[int], ragged: Mapping[str, Axes], lengths: Sequence[Lengths]
) -> Sequence[Any]:
    """Return the outputs of each request; raise BatchError. A ragged output is a list with one array for each
    row, or a padded array, which is cut to the lengths of the input that was padded to its sizes.
    """
    total = sum(rows)
    columns: dict[str, Any] = {}
    for name, value in outputs.items():
        is_list = isinstance(value, list | tuple)
        array = value if is_list or hasattr(value, "shape") else np.asarray(value)
        count = len(value) if is_list else row_count({name: array})
        if count != total:
            raise BatchError(f"Received output {name!r} with {count} rows, but the batch has {total}")
        is_cut = name in ragged and not is_list and lengths
        columns[name] = _cut_rows(name, array, ragged[name], lengths, rows) if is_cut else array
    if not any(isinstance(one, list | tuple) for one in columns.values()):
        return BatchedOutputs(columns, rows)
    apart = {name: list(one) for name, one in columns.items() if isinstance(one, RaggedTensor)}
    answers: list[dict[str, Any] | BatchError] = []
    start = 0
    for position, count in enumerate(rows):
        end = start + count
        try:
            answers.append(
                {
                    name: apart[name][position] if name in apart else _own_rows(name, one[start:end])
                    for name, one in columns.items()
                }
            )
        except BatchError as error:
            answers.append(error)
        start = end
    return answers


def _cut_rows(
    name: str, value: Any, axes: Axes, lengths: Sequence[Lengths], rows: Sequence[int]
) -> RaggedTensor | list[Any] | Any:
    """Return an output's rows without padding: of each request, a list, or unchanged if none was added."""
    sizes = tuple([value.shape[axis + 1] for axis in axes])
    found = next((one for one in lengths if one.padded == sizes), None)
    if found is None:
        given = " and ".join(str(list(one.padded)) for one in lengths)
        raise BatchError(
            f"The ragged output {name!r} has the sizes {list(sizes)}, but inputs were padded to {given}: "
            "return such an array, or a list with one array for each row"
        )
    if not found.is_longer:
        return value
    if axes == (0,) and type(value) is np.ndarray and value.dtype.kind in _NUMERIC and len(rows) > 1:
        return _cut_bytes(value, found, rows)
    cut = []
    for row, row_sizes in zip(value, found.sizes.tolist(), strict=True):
        part = [slice(None)] * (axes[-1] + 1)
        for axis, size, end in zip(axes, row_sizes, found.padded, strict=True):
            part[axis] = slice(size) if found.side == _RIGHT else slice(end - size, end)
        cut.append(row[tuple(part)])
    return cut


def _cut_bytes(value: Any, lengths: Lengths, rows: Sequence[int]) -> RaggedTensor:
    """Return rows whose first axis is the only variable one: each row is one range of bytes."""
    inner = value.shape[2:]
    step = element_count(inner) * value.dtype.itemsize
    source = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    row_nbytes = value.shape[1] * step
    sizes = lengths.sizes[:, 0].tolist()
    parts: list[memoryview] = []
    for number, size in enumerate(sizes):
        start = number * row_nbytes + (0 if lengths.side == _RIGHT else row_nbytes - size * step)
        parts.append(source[start : start + size * step])
    firsts = itertools.accumulate(rows[:-1], initial=0)
    shapes = [(count, sizes[first], *inner) for count, first in zip(rows, firsts, strict=True)]
    return RaggedTensor(np.frombuffer(b"".join(parts), value.dtype), shapes, (0,))


def _own_rows(name: str, rows: Any) -> Any:
    if not isinstance(rows, list | tuple):
        return rows
    arrays = [one if hasattr(one, "shape") else np.asarray(one) for one in rows]
    if len(arrays) == 1:
        return arrays[0][None]
    if len({tuple(one.shape) for one in arrays}) > 1:
        shapes = " and ".join(sorted({str(tuple(one.shape)) for one in arrays}))
        raise BatchError(f"The rows of output {name!r} of one request have the shapes {shapes}; expected one")
    library = library_of(arrays[0])
    return np.stack(arrays) if library == "numpy" else sys.modules[library].stack(arrays)
