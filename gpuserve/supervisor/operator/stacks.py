"""The verb ``stacks``: where every process of the server stands. One is asked after the other, and told as
soon as it is known, so that no answer is longer than a message may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpuserve.control.operator import AnswerOutcome, Tell, VerbOutcome
from gpuserve.supervisor.core.front_keeper import FrontKeeper
from gpuserve.supervisor.core.kept_child import KeptChild
from gpuserve.supervisor.models.generations import GenerationTable


class _Asked(NamedTuple):
    """A process by its name, and how it is reached; None where there is none now."""

    name: str
    child: KeptChild | None


class OperatorStacks:
    """The stacks of the front and of the server's own workers."""

    def __init__(self, front: FrontKeeper, table: GenerationTable) -> None:
        self._front = front
        self._table = table

    def ask(self, tell: Tell, answer: AnswerOutcome) -> None:
        """Tell of each process: its name in the first line, its stacks below."""
        self._next(self._processes(), tell, lambda: answer(VerbOutcome()))

    def _processes(self) -> Iterator[_Asked]:
        yield _Asked("front", self._front.child)
        for worker in list(self._table.workers()):
            yield _Asked(f"model {worker.spec.name}, instance {worker.instance.name}", worker.child)

    def _next(self, processes: Iterator[_Asked], tell: Tell, done: Callable[[], None]) -> None:
        for name, child in processes:
            if child is None:
                continue
            head = f"{name}, process {child.process.pid}:"

            def take(stacks: str, head: str = head) -> None:
                tell(f"{head}\n{stacks}")
                self._next(processes, tell, done)

            child.stacks.ask(take)
            return
        done()
