"""What a runtime can know of the model that it serves, and of the processors that it may keep busy. No kind
of file is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gpuserve.devices.placement import n_processors
from gpuserve_worker.calling.context import ModelContext, current_model
from gpuserve_worker.calling.request import Batch

#: The largest batch of a file that batches, where the config says nothing.
MAX_BATCH_SIZE: Final = 32


def threads_of(instances: int) -> int:
    """How many threads an instance may keep busy: its part of the processors that it may use."""
    return max(1, int(n_processors() / max(1, instances)))


def served_model() -> ModelContext | None:
    """The model that this is made for; None where it is made by hand."""
    try:
        return current_model()
    except LookupError:
        return None


def is_single(ranks: Mapping[str, int]) -> bool:
    """Whether the model is served without batches where the file has a batch axis, so that each request is a
    row. ``ranks`` are the numbers of axes of the file's inputs.
    """
    model = served_model()
    if model is None or model.batching or not model.inputs:
        return False
    return all(len(one.shape) + 1 == ranks.get(one.name) for one in model.inputs)


def each_alone(
    answer: Callable[[list[Any]], Any], requests: Any, refused: type[Exception] = Exception
) -> list[Any] | None:
    """Answer each request of a batch that failed by itself, so that a bad request fails no other one.

    Args:
        answer: Answers a list of requests, or raises.
        requests: The batch or list of requests that failed.
        refused: Type of the errors that are the answer to the request that raised them.

    Returns:
        An answer or an error for each request; None if there is only one, so that its error is known.
    """
    alone = requests.as_list() if isinstance(requests, Batch) else requests
    if len(alone) == 1:
        return None
    answers: list[Any] = []
    for one in alone:
        try:
            answers.append(answer([one])[0])
        except refused as error:
            answers.append(error)
    return answers
