"""What an inference callable is given and may give back: ``Request``, and batches of them.

Users see ``Request``. ``RequestBatch`` is the list the worker passes; it also holds the arrays of
the whole batch, so that ``@batch`` can hand them on without concatenating. ``BatchedOutputs`` is
its counterpart on the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays: TypeAlias = dict[str, NDArray[Any]]


class Request(MutableMapping[str, "NDArray[Any]"]):
    """One request: its input arrays by name, and the parameters that came with it.

    ``data`` maps input names, in declaration order, to arrays; an optional input that was not sent
    is absent. Where the model batches, axis 0 of every array is the batch axis. ``parameters`` holds
    the request's own parameters; ``requested_output_names`` what the client asked for (every output
    when it named none).
    """

    __slots__ = ("data", "parameters", "requested_output_names")

    def __init__(
        self,
        data: Arrays,
        parameters: Mapping[str, Any] | None = None,
        requested_output_names: Sequence[str] | None = None,
    ) -> None:
        self.data = data
        self.parameters: dict[str, Any] = dict(parameters) if parameters else {}
        self.requested_output_names = requested_output_names

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.data[name]

    def __setitem__(self, name: str, array: NDArray[Any]) -> None:
        self.data[name] = array

    def __delitem__(self, name: str) -> None:
        del self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {getattr(a, 'shape', '?')}" for name, a in self.data.items())
        return f"Request({shapes})"


class RequestBatch(list[Request]):
    """The requests of one call, in order, and their arrays before they were cut apart.

    ``arrays`` holds one array for each input with the rows of every request, or is None where the
    model does not batch. ``rows`` is how many rows each request has. ``output_names`` are the
    declared outputs, in order: a callable that answers with a list means them by position.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        arrays: Arrays | None,
        rows: Sequence[int],
        output_names: Sequence[str],
    ) -> None:
        super().__init__(requests)
        self.arrays = arrays
        self.rows = tuple(rows)
        self.output_names = tuple(output_names)


class BatchedOutputs(Sequence["Arrays"]):
    """Outputs of a whole batch, seen as one mapping of arrays for each request.

    Iterating or indexing cuts views; the worker sends ``arrays`` as they are.
    """

    __slots__ = ("_starts", "arrays", "rows")

    def __init__(self, arrays: Arrays, rows: Sequence[int]) -> None:
        self.arrays = arrays
        self.rows = tuple(rows)
        starts = [0]
        for count in self.rows:
            starts.append(starts[-1] + count)
        self._starts = starts

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self.rows))[index]
        start, stop = self._starts[position], self._starts[position + 1]
        return {name: array[start:stop] for name, array in self.arrays.items()}
