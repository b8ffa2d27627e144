"""The GPU's side of a process: one thread that executes queued operations, late, in any order that CUDA
allows.

An operation waits for those before it, takes its engine for its time, and has its effect at its end: who
reads the result too early gets old data. It reads from its beginning to its end: who writes the source too
late, or again too early, has a part of it copied.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Final

from cuda_simulation.errors import LAUNCH_FAILURE, CUDARuntimeError

#: How often the state of events of other processes is looked at.
_POLL_S: Final = 0.0002


class Engine(Enum):
    """Parts of a GPU, each of which does one thing at a time."""

    COMPUTE = auto()
    HOST_TO_DEVICE = auto()
    DEVICE_TO_HOST = auto()
    DEVICE_TO_DEVICE = auto()
    #: Calls into the host's code, all in one thread.
    HOST_CODE = auto()


def _nothing() -> None:
    """The effect of an operation that only marks a place."""


def _at_once() -> bool:
    return True


@dataclass(eq=False)
class Operation:
    """Something queued. ``engine`` None: it takes no time; ``duration_s`` 0: a short one. ``may_start`` is
    asked again and again.
    """

    gpu_uuid: str
    engine: Engine | None = None
    duration_s: float = 0.0
    begin: Callable[[], None] = _nothing
    effect: Callable[[], None] = _nothing
    may_start: Callable[[], bool] = _at_once
    after: list[Operation] = field(default_factory=list)
    not_before: float = 0.0
    done: bool = False
    finished_at: float = 0.0


def _is_long(operation: Operation) -> bool:
    """Whether the kernel keeps those of other processes waiting; short ones do not, for the tests' time."""
    return operation.engine is Engine.COMPUTE and operation.duration_s > 0


class Turns:
    """The turns of processes at the GPUs: without MPS, kernels of two never run together."""

    def __init__(self, directory: Path, are_shared: Callable[[], bool]) -> None:
        self._directory = directory
        self._are_shared = are_shared
        self._files: dict[str, int] = {}

    def take(self, gpu_uuid: str) -> bool:
        """Whether it is this process's turn, until ``end``."""
        if self._are_shared():
            return True
        # Who waits is next, whoever ends a kernel and wants to begin another.
        next_one, turn = (self._file(f"{name}-{gpu_uuid}") for name in ("next", "turn"))
        try:
            fcntl.flock(next_one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(next_one, fcntl.LOCK_UN)
        return True

    def end(self, gpu_uuid: str) -> None:
        fcntl.flock(self._file(f"turn-{gpu_uuid}"), fcntl.LOCK_UN)

    def _file(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        return self._files[name]


class Scheduler:
    """Executes operations. ``failure`` is the status of the first that failed; after it none is executed."""

    def __init__(self, delay_s: Callable[[], float], seed: int, turns: Turns) -> None:
        self.failure = 0
        self._turns = turns
        self._delay_s = delay_s
        self._random = random.Random(seed)
        #: Also that of the streams: objects that are collected while it is held call back into CUDA.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._waiting: list[Operation] = []
        self._running: list[tuple[float, int, Operation]] = []
        self._numbers = itertools.count()
        self._busy: set[tuple[str, Engine]] = set()
        self._host_code: queue.SimpleQueue[Operation] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name="cuda stand-in", daemon=True)
            for run in (self._execute, self._call_host_code)
        ]

    def submit(self, operation: Operation) -> None:
        """Queue an operation; it starts some time later. Those of ``after`` are before it."""
        with self._changed:
            if self.failure:
                operation.done = True
                return
            if not self._threads[0].is_alive():
                for thread in self._threads:
                    thread.start()
            operation.after = [one for one in operation.after if not one.done]
            operation.not_before = time.monotonic() + self._random.random() * self._delay_s()
            self._waiting.append(operation)
            self._changed.notify_all()

    def is_full(self, most: int) -> bool:
        """Whether as many operations wait; never in the threads that execute them."""
        return len(self._waiting) >= most and threading.current_thread() not in self._threads

    def wait(self, operations: Iterable[Operation]) -> None:
        """Return once all are done; at once in the thread that executes them, where objects of the host may
        be collected.
        """
        if threading.current_thread() is self._threads[0]:
            return
        left = list(operations)
        with self._changed:
            self._changed.wait_for(lambda: all(one.done for one in left))

    def fail(self, status: int) -> None:
        """The process's context is lost: whatever is queued is done, without an effect."""
        with self._changed:
            self.failure = self.failure or status
            for operation in [*self._waiting, *(one for _, _, one in self._running)]:
                operation.done = True
            for _, _, one in self._running:
                if _is_long(one):
                    self._turns.end(one.gpu_uuid)
            self._waiting.clear()
            self._running.clear()
            self._changed.notify_all()

    def _execute(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                self._start_what_can(now)
                due = self._due(now)
                if due is None:
                    self._changed.wait(self._pause_s(now))
                    continue
            self._finish(due)

    def _start_what_can(self, now: float) -> None:
        ready = [one for one in self._waiting if self._can_start(one, now)]
        self._random.shuffle(ready)
        for operation in ready:
            place = operation.engine and (operation.gpu_uuid, operation.engine)
            if place in self._busy or (_is_long(operation) and not self._turns.take(operation.gpu_uuid)):
                continue
            if place:
                self._busy.add(place)
            self._waiting.remove(operation)
            operation.after = []  # else each operation keeps all that were ever before it
            self._start(operation, now)

    def _start(self, operation: Operation, now: float) -> None:
        if operation.engine is Engine.HOST_CODE:
            self._host_code.put(operation)
            return
        duration_s = operation.duration_s
        if operation.engine and not duration_s:
            duration_s = self._random.random() * self._delay_s()
        heapq.heappush(self._running, (now + duration_s, next(self._numbers), operation))
        self._attempt(operation.begin, operation)

    def _can_start(self, operation: Operation, now: float) -> bool:
        return (
            operation.not_before <= now and all(one.done for one in operation.after) and operation.may_start()
        )

    def _due(self, now: float) -> Operation | None:
        if self._running and self._running[0][0] <= now:
            return heapq.heappop(self._running)[2]
        return None

    def _pause_s(self, now: float) -> float | None:
        """How long nothing can happen but by a new operation; None: for ever."""
        times = [finish - now for finish, _, _ in self._running[:1]]
        for operation in self._waiting:
            if operation.not_before > now:
                times.append(operation.not_before - now)
            elif operation.may_start is not _at_once or _is_long(operation):
                times.append(_POLL_S)
        return max(0.0, min(times)) if times else None

    def _call_host_code(self) -> None:
        while True:
            self._finish(self._host_code.get())

    def _attempt(self, step: Callable[[], None], operation: Operation) -> None:
        try:
            if not self.failure:
                step()
        except CUDARuntimeError as error:
            self.fail(error.status)
        except Exception:  # the host's code raised, which CUDA does not see, or a kernel of ours is wrong
            traceback.print_exc()
            if operation.engine is not Engine.HOST_CODE:
                self.fail(LAUNCH_FAILURE)

    def _finish(self, operation: Operation) -> None:
        self._attempt(operation.effect, operation)
        if _is_long(operation):
            self._turns.end(operation.gpu_uuid)
        with self._changed:
            operation.done, operation.finished_at = True, time.monotonic()
            if operation.engine:
                self._busy.discard((operation.gpu_uuid, operation.engine))
            self._changed.notify_all()
