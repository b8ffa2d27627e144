"""From the rows of requests to the values that a pipeline takes, and from its results back to the requests. A
request whose rows cannot be read fails alone. No pipeline is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuserve.core.errors import InvalidArgument

Arrays: TypeAlias = Mapping[str, NDArray[Any]]


def answer_rows(
    requests: Sequence[Arrays],
    read: Callable[[Arrays], list[Any]],
    run: Callable[[list[Any]], dict[str, NDArray[Any]]],
) -> list[Any]:
    """The answer to each request: its part of what ``run`` gives for the rows of all of them. ``read`` gives
    the rows of a request, and raises ValueError where they are none.
    """
    answers: list[Any] = [None] * len(requests)
    values: list[Any] = []
    spans: list[tuple[int, slice]] = []
    for position, request in enumerate(requests):
        try:
            rows = read(request)
        except ValueError as error:
            answers[position] = InvalidArgument(str(error))
            continue
        spans.append((position, slice(len(values), len(values) + len(rows))))
        values += rows
    outputs = run(values) if values else {}
    for position, span in spans:
        answers[position] = {name: array[span] for name, array in outputs.items()}
    return answers


def texts_in(name: str) -> Callable[[Arrays], list[Any]]:
    """Reads the input of this name as texts."""

    def read(request: Arrays) -> list[str]:
        try:
            return [one.decode() for one in request[name].ravel()]
        except UnicodeDecodeError as error:
            raise ValueError(f"Input {name!r} must be text in UTF-8, but {error}") from None

    return read


def column(values: Sequence[Any]) -> NDArray[np.object_]:
    """Texts as BYTES, one a row."""
    made = np.empty((len(values), 1), dtype=object)
    for row, value in enumerate(values):
        made[row, 0] = value.encode() if isinstance(value, str) else value
    return made


def scored(found: Sequence[Sequence[Mapping[str, Any]]], labels: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The best label, its score and all scores in the order of ``labels``, of each row's labels with
    scores.
    """
    place = {label: position for position, label in enumerate(labels)}
    scores = np.zeros((len(found), len(labels)), dtype=np.float32)
    for row, classes in enumerate(found):
        for one in classes:
            scores[row, place[one["label"]]] = one["score"]
    best = scores.argmax(axis=1)
    return {
        "label": column([labels[one] for one in best]),
        "score": np.take_along_axis(scores, best[:, None], axis=1),
        "scores": scores,
    }


def scored_outputs(labels: Sequence[str]) -> list[dict[str, Any]]:
    """The outputs of ``scored`` as a config file has them."""
    return [
        {"name": "label", "dtype": "bytes", "shape": [1]},
        {"name": "score", "dtype": "float32", "shape": [1]},
        {"name": "scores", "dtype": "float32", "shape": [len(labels)], "labels": list(labels)},
    ]


def declared(inputs: list[Any], outputs: list[Any], max_batch_size: int, **more: Any) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": outputs, "max_batch_size": max_batch_size, **more}
