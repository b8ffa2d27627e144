"""Operations on models (load, unload, resize), queued for each model in order of arrival. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeAlias

from gpuserve.core.errors import (
    Cancelled,
    GpuserveError,
    Internal,
    InvalidArgument,
    ModelLoadError,
    RequestError,
    StartupError,
)
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.models.generations import Generation

#: Receives the result of an operation: an error, or None for success.
OnDone: TypeAlias = Callable[[GpuserveError | None], None]
#: Makes the error of a version that failed to load, from its declaration, the instance and the reason.
Failure: TypeAlias = Callable[[ModelSpec, str, str], GpuserveError]


class OperationEnd(NamedTuple):
    """The end of an operation, with its error, if any."""

    error: GpuserveError | None


@dataclass(eq=False)
class ModelOperation:
    """One operation on a model."""

    model: str
    answer: OnDone


@dataclass(eq=False)
class LoadOperation(ModelOperation):
    """The load of versions of a model. ``prepare``, if given, is called first and reports its result. Then
    ``read`` returns the declarations. With ``replaces`` the loaded versions replace all served versions,
    otherwise they join them. With ``is_last_word`` the load overtakes earlier operations.
    """

    read: Callable[[], Sequence[ModelSpec]]
    failure: Failure
    replaces: bool
    is_last_word: bool = False
    prepare: Callable[[OnDone], None] | None = None
    generations: list[Generation] = field(default_factory=list)


@dataclass(eq=False)
class UnloadOperation(ModelOperation):
    """The unload of every version of a model."""


@dataclass(eq=False)
class ResizeOperation(ModelOperation):
    """The resize of a served model to ``count`` instances on each device of each version."""

    count: int


class OperationQueues:
    """The queues of operations, one for each model. The first operation of a queue is running."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[ModelOperation]] = {}

    def put(self, operation: ModelOperation) -> bool:
        """Queue an operation. Return whether it is the first of its queue, so that it can run now."""
        queue = self._queues.setdefault(operation.model, deque())
        queue.append(operation)
        return len(queue) == 1

    def running(self, model: str) -> ModelOperation | None:
        queue = self._queues.get(model)
        return queue[0] if queue else None

    def is_overtaken(self, operation: ModelOperation) -> bool:
        """Return whether this running load or resize is to be cancelled in favour of a later operation."""
        queue = self._queues.get(operation.model, deque())
        is_first = bool(queue) and queue[0] is operation and not isinstance(operation, UnloadOperation)
        return is_first and any(
            later.is_last_word if isinstance(later, LoadOperation) else isinstance(later, UnloadOperation)
            for later in islice(queue, 1, None)
        )

    def load_of(self, generation: Generation) -> LoadOperation | None:
        """Return the running load that a generation belongs to, or None."""
        running = self.running(generation.spec.name)
        return running if isinstance(running, LoadOperation) and generation in running.generations else None

    def finish(self, operation: ModelOperation, error: GpuserveError | None = None) -> ModelOperation | None:
        """Report the result of the running operation. Return the operation that runs next, if any."""
        assert operation is self.running(operation.model), "an operation is answered once"
        queue = self._queues[operation.model]
        queue.popleft()
        if not queue:
            del self._queues[operation.model]
        following = self.running(operation.model)
        operation.answer(error)  # the callback may queue more operations, or cancel all
        return following if following is self.running(operation.model) else None

    def pop_all(self) -> Iterator[ModelOperation]:
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            yield from queue


def cancelled_error(model: str) -> RequestError:
    """Return the error for an operation that was still running when a later one overtook it."""
    return Cancelled(f"model '{model}': the load was cancelled by a later operation")


def cannot_poll(model: str) -> RequestError:
    """Return the error for a client if the model's declaration cannot be read. The text is Triton's."""
    return Internal(f"failed to load '{model}', failed to poll from model repository")


def refused_load(spec: ModelSpec, instance: str, reason: str) -> RequestError:
    state = f"version {spec.version} is at UNAVAILABLE state: {reason};\n"
    return InvalidArgument(f"load failed for model '{spec.name}': {state}")


def failed_version(spec: ModelSpec, instance: str, reason: str) -> InvalidArgument:
    where = f"instance {instance} could not be started: " if instance else ""
    return InvalidArgument(f"version {spec.version}: {where}{reason}")


def failed_start(spec: ModelSpec, instance: str, reason: str) -> StartupError:
    return ModelLoadError(f"model {spec.name!r}: instance {instance} could not be started: {reason}")
