"""Loads, unloads and changes of size that were asked for, each model's in the order of their coming. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeAlias

from gpuserve.errors import (
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

#: Tells whoever asked how it went; None: well.
Answer: TypeAlias = Callable[[GpuserveError | None], None]
#: Why a version could not be loaded: its declaration, the instance, the reason.
Failure: TypeAlias = Callable[[ModelSpec, str, str], GpuserveError]


class OperationEnd(NamedTuple):
    """The end of an operation, with the error that it ended by, if any."""

    error: GpuserveError | None


@dataclass(eq=False)
class ModelOperation:
    """What is to be done to a model, once."""

    model: str
    answer: Answer

    @property
    def overtakes(self) -> bool:
        """Whether loads and changes of size that were asked for before are taken back for it."""
        return False


@dataclass(eq=False)
class LoadOperation(ModelOperation):
    """The load of versions of a model. When it is its turn ``prepare`` is begun, where there is one, which
    may take its time and says how it went; then ``read`` gives the declarations. With ``replaces`` they take
    the place of all versions that are served; otherwise they join them. An operator's ``is_last_word``
    overtakes others.
    """

    read: Callable[[], Sequence[ModelSpec]]
    failure: Failure
    replaces: bool
    is_last_word: bool = False
    prepare: Callable[[Answer], None] | None = None
    generations: list[Generation] = field(default_factory=list)

    @property
    def overtakes(self) -> bool:
        return self.is_last_word


@dataclass(eq=False)
class UnloadOperation(ModelOperation):
    """The unload of every version of a model."""

    @property
    def overtakes(self) -> bool:
        return True


@dataclass(eq=False)
class ResizeOperation(ModelOperation):
    """The change of a served model to ``count`` instances on each device that each version has."""

    count: int


class Operations:
    """One queue a model; its first operation is the one at work."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[ModelOperation]] = {}

    def put(self, operation: ModelOperation) -> bool:
        queue = self._queues.setdefault(operation.model, deque())
        queue.append(operation)
        return len(queue) == 1

    def running(self, model: str) -> ModelOperation | None:
        queue = self._queues.get(model)
        return queue[0] if queue else None

    def is_overtaken(self, operation: ModelOperation) -> bool:
        """Whether a load or a change of size is at work, and is to be taken back for what came after it."""
        queue = self._queues.get(operation.model, deque())
        is_first = bool(queue) and queue[0] is operation and not isinstance(operation, UnloadOperation)
        return is_first and any(one.overtakes for one in islice(queue, 1, None))

    def load_of(self, generation: Generation) -> LoadOperation | None:
        """Return the load that a generation belongs to, while it is at work."""
        running = self.running(generation.spec.name)
        return running if isinstance(running, LoadOperation) and generation in running.generations else None

    def finish(self, operation: ModelOperation, error: GpuserveError | None = None) -> ModelOperation | None:
        """Answer the operation at work, and return the one whose turn it is now."""
        assert operation is self.running(operation.model), "an operation is answered once"
        queue = self._queues[operation.model]
        queue.popleft()
        if not queue:
            del self._queues[operation.model]
        following = self.running(operation.model)
        operation.answer(error)  # which may ask for more, or end all
        return following if following is self.running(operation.model) else None

    def take_all(self) -> Iterator[ModelOperation]:
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            yield from queue


def taken_back(model: str) -> RequestError:
    """Make the error for whoever asked for something that was still being loaded when another word came."""
    return Cancelled(f"model '{model}': the load was taken back, for what was asked for after it")


def cannot_poll(model: str) -> RequestError:
    """Make the error for a client whose model has no declaration that can be read."""
    return Internal(f"failed to load '{model}', failed to poll from model repository")


def refused_load(spec: ModelSpec, instance: str, reason: str) -> RequestError:
    return InvalidArgument(
        f"load failed for model '{spec.name}': version {spec.version} is at UNAVAILABLE state: {reason};\n"
    )


def failed_version(spec: ModelSpec, instance: str, reason: str) -> InvalidArgument:
    where = f"instance {instance} could not be started: " if instance else ""
    return InvalidArgument(f"version {spec.version}: {where}{reason}")


def failed_start(spec: ModelSpec, instance: str, reason: str) -> StartupError:
    return ModelLoadError(f"model {spec.name!r}: instance {instance} could not be started: {reason}")
