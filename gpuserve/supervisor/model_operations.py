"""Loads, unloads and changes of size that were asked for, each model's in the order in which they came. Pure:
what an operation does is in ``served_models.py`` and ``resizing.py``.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from gpuserve.errors import GpuserveError, Internal, InvalidArgument, RequestError, StartupError
from gpuserve.spec import ModelSpec
from gpuserve.supervisor.generation import Generation

#: Tells whoever asked how it went; None: well.
Answer: TypeAlias = Callable[[GpuserveError | None], None]
#: Why a version could not be loaded: its declaration, the instance, the reason.
Failure: TypeAlias = Callable[[ModelSpec, str, str], GpuserveError]


class Done(NamedTuple):
    """An operation is over; with what error, if with any."""

    error: GpuserveError | None


class OperationState(enum.Enum):
    """Where an operation stands."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    ANSWERED = "ANSWERED"


TRANSITIONS: Final[dict[OperationState, frozenset[OperationState]]] = {
    OperationState.WAITING: frozenset({OperationState.RUNNING, OperationState.ANSWERED}),
    OperationState.RUNNING: frozenset({OperationState.ANSWERED}),
    OperationState.ANSWERED: frozenset(),
}


@dataclass(eq=False)
class Operation:
    """Something to be done to a model, once."""

    model: str
    answer: Answer
    state: OperationState = field(default=OperationState.WAITING, init=False)

    def move(self, state: OperationState) -> None:
        """Move on."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"an operation cannot go from {self.state.name} to {state.name}")
        self.state = state


@dataclass(eq=False)
class Load(Operation):
    """Load versions of a model.

    ``read`` gives their declarations, when it is their turn. With ``replaces`` they take the place of all
    versions that are served; otherwise they join them.
    """

    read: Callable[[], Sequence[ModelSpec]]
    failure: Failure
    replaces: bool
    generations: list[Generation] = field(default_factory=list)


@dataclass(eq=False)
class Unload(Operation):
    """Unload every version of a model."""


@dataclass(eq=False)
class Resize(Operation):
    """Give every version of a model that is served ``count`` instances on each device that it has."""

    count: int


class Operations:
    """One queue a model; its first operation is the one at work."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Operation]] = {}

    def put(self, operation: Operation) -> bool:
        """Queue an operation; true: it is its turn at once."""
        queue = self._queues.setdefault(operation.model, deque())
        queue.append(operation)
        return len(queue) == 1

    def running(self, model: str) -> Operation | None:
        """The operation at work on a model."""
        queue = self._queues.get(model)
        return queue[0] if queue else None

    def load_of(self, generation: Generation) -> Load | None:
        """The load that a generation belongs to, while it is at work."""
        running = self.running(generation.spec.name)
        return running if isinstance(running, Load) and generation in running.generations else None

    def finish(self, operation: Operation, error: GpuserveError | None = None) -> Operation | None:
        """Answer the operation at work; the one whose turn it is now."""
        operation.move(OperationState.ANSWERED)
        queue = self._queues[operation.model]
        queue.popleft()
        if not queue:
            del self._queues[operation.model]
        following = self.running(operation.model)
        operation.answer(error)  # which may ask for more, or end all
        return following if following is self.running(operation.model) else None

    def take_all(self) -> Iterator[Operation]:
        """Every operation, none of which is queued any more."""
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            yield from queue


def cannot_poll(model: str) -> RequestError:
    """What a client is told of a model whose declaration cannot be read."""
    return Internal(f"failed to load '{model}', failed to poll from model repository")


def refused_load(spec: ModelSpec, instance: str, reason: str) -> RequestError:
    """What a client is told of a version that could not be loaded."""
    return InvalidArgument(
        f"load failed for model '{spec.name}': version {spec.version} is at UNAVAILABLE state: {reason};\n"
    )


def failed_version(spec: ModelSpec, instance: str, reason: str) -> InvalidArgument:
    """What an operator is told of it."""
    where = f"instance {instance} could not be started: " if instance else ""
    return InvalidArgument(f"version {spec.version}: {where}{reason}")


def failed_start(spec: ModelSpec, instance: str, reason: str) -> StartupError:
    """What a program is told of a model of its own that could not be loaded."""
    return StartupError(f"model {spec.name!r}: instance {instance} could not be started: {reason}")
