"""What a function under ``batch`` or ``sample`` answers with: its outputs by name, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuserve.decorators.errors import BatchError


class SomeRows(NamedTuple):
    """An answer for these rows of the batch alone, ``positions``; the others have none this time.

    What ``group_by_values`` yields over a generator.
    """

    arrays: dict[str, Any]
    positions: Sequence[int]


def named(result: Any, output_names: Sequence[str]) -> Mapping[str, Any]:
    """Outputs by name. Where the declared names are not known, OUTPUT_1…: they map by position later. Raises
    ``BatchError`` where they are no outputs, or not as many as are declared.
    """
    if type(result) is dict:
        return result
    values: Sequence[Any]
    if isinstance(result, (list, tuple)):
        values = result
    elif isinstance(result, Mapping):
        return result
    elif hasattr(result, "__array__"):
        values = [result]
    else:
        raise BatchError(
            f"Unsupported output type {type(result).__name__}: expected a mapping of output names to arrays, "
            "a list of arrays in the order of the declared outputs, or one array"
        )
    names = output_names or [f"OUTPUT_{position}" for position in range(1, len(values) + 1)]
    if len(values) != len(names):
        raise BatchError(
            f"The inference callable returned {len(values)} {'output' if len(values) == 1 else 'outputs'}, "
            f"but the model declares {len(names)}: {', '.join(names)}"
        )
    return dict(zip(names, values, strict=True))


def check_rows(outputs: Mapping[str, Any], rows: int) -> None:
    """Check that the first axis of every output is as long as the batch. Raises ``BatchError`` where one
    is not.
    """
    for name, value in outputs.items():
        shape = value.shape if hasattr(value, "shape") else np.shape(value)
        if not shape or shape[0] != rows:
            raise BatchError(
                f"Received output {name!r} of shape {tuple(shape)}, but the batch has {rows} "
                f"{'row' if rows == 1 else 'rows'}: the first axis of every output must be as long"
            )


def each_changed(result: Any, change: Callable[[Any], Any]) -> Any:
    """Outputs of the same form (mapping, list, one array), with ``change`` applied to each."""
    if isinstance(result, Mapping):
        return {name: change(value) for name, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [change(value) for value in result]
    return change(result)


def per_request(answer: SomeRows, rows: Sequence[int]) -> list[dict[str, Any] | BatchError | None]:
    """A response for each request that has all its rows in the answer, None for those that have none.

    One that has only some of its rows in it cannot be answered: its response is an error.
    """
    places = {position: place for place, position in enumerate(answer.positions)}
    responses: list[dict[str, Any] | BatchError | None] = []
    stop = 0
    for count in rows:
        start, stop = stop, stop + count
        own = [places[position] for position in range(start, stop) if position in places]
        responses.append(_response(answer.arrays, own, count) if own else None)
    return responses


def _response(arrays: Mapping[str, Any], own: list[int], count: int) -> dict[str, Any] | BatchError:
    if len(own) == count:
        return {name: rows_of(value, own) for name, value in arrays.items()}
    return BatchError(
        "The rows of this request are in several groups of @group_by_values, which a generator answers one "
        "after the other: send them as requests of their own, or make their values equal"
    )


def rows_of(value: Any, positions: Sequence[int]) -> Any:
    """These rows of an array, in this order: a view where they follow each other."""
    array = value if hasattr(value, "shape") else np.asarray(value)
    if not positions:
        return array[:0]
    first, last = positions[0], positions[-1]
    if list(positions) == list(range(first, last + 1)):
        return array[first : last + 1]
    return array[list(positions)]
