"""A stepped callable in this process: its requests are stepped together, by the rules of a worker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeAlias

from gpuserve_worker.execution.stepper import Stepper, StepRequest
from gpuserve_worker.protocol.wire import YIELD_WINDOW

_Turn: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class LocalStep(StepRequest):
    """A request of a test. ``response`` is that of the last step, or None."""

    __slots__ = ("is_over", "request", "response")

    def __init__(self, request: Any) -> None:
        super().__init__(YIELD_WINDOW)
        self.request = request
        self.response: Any = None
        self.is_over = False


class LocalSteps:
    """Requests of one stepped callable; implements ``StepSink``. ``run`` runs a coroutine to its end.
    Exceptions of the callable are raised unchanged.
    """

    def __init__(self, made: Any, max_active: int, run: Callable[[_Turn], object]) -> None:
        self._stepper: Stepper[LocalStep, Exception] = Stepper(made, self)
        self._max_active = max_active
        self._run = run
        self._queue: list[LocalStep] = []

    def responses(self, requests: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield the responses of each step with any: one for each request, or None."""
        steps = [LocalStep(one) for one in requests]
        self._queue = list(steps)
        try:
            while not all(one.is_over for one in steps):
                self._run(self._turn)
                found = [one.response for one in steps]
                if any(one is not None for one in found):
                    yield found
                for one in steps:
                    one.response, one.credit = None, YIELD_WINDOW
        finally:
            self._stepper.close()

    async def _turn(self) -> None:
        while self._queue and len(self._stepper.active) + len(self._stepper.waiting) < self._max_active:
            self._stepper.arrive(self._queue.pop(0))
        await self._stepper.admit_waiting()
        if self._stepper.ready:
            await self._stepper.step()

    def request_of(self, entry: LocalStep) -> Any:
        return entry.request

    def respond(self, entries: Sequence[LocalStep], responses: Sequence[Any], last: Sequence[int]) -> Any:
        for entry, response in zip(entries, responses, strict=True):
            entry.response = response
        return ()

    def stepped(self, busy_ns: int, active: int) -> None:
        """Do nothing: nobody reads the time of a test's steps."""

    def failure(self, error: Exception, entry: LocalStep | None = None) -> Exception:
        return error

    def failed(self, entry: LocalStep, failure: Exception) -> None:
        raise failure

    retry = failed

    def ended(self, entry: LocalStep) -> None:
        entry.is_over = True

    cancelled = ended

    def postponed(self, entries: Sequence[LocalStep]) -> None:
        self._queue = [*entries, *self._queue]

    def release_failed(self, error: Exception) -> None:
        raise error
