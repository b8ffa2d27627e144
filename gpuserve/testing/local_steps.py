"""A stepped callable in this process: its requests are stepped together, by the rules of a worker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeAlias

from gpuserve_worker.execution.stepper import Stepper, StepRequest
from gpuserve_worker.protocol.wire import YIELD_WINDOW

_Turn: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class LocalStep(StepRequest):
    """A request of a test. ``responses`` are those of the last step."""

    __slots__ = ("is_over", "request", "responses")

    def __init__(self, request: Any) -> None:
        super().__init__(YIELD_WINDOW)
        self.request = request
        self.responses: list[Any] = []
        self.is_over = False


class LocalSteps:
    """Requests of a stepped callable, a ``StepSink``. ``run`` runs coroutines. Exceptions pass unchanged."""

    def __init__(
        self, made: Any, max_active: int, run: Callable[[_Turn], object], output_names: Sequence[str]
    ) -> None:
        self._stepper: Stepper[LocalStep, Exception] = Stepper(made, self, output_names)
        self._max_active = max_active
        self._run = run
        self._queue: list[LocalStep] = []

    def responses(self, requests: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield the responses of the steps: each time one for each request, or None, and at least one."""
        steps = [LocalStep(one) for one in requests]
        self._queue = list(steps)
        try:
            while not all(one.is_over for one in steps):
                self._run(self._turn)
                for one in steps:
                    self._stepper.add_credit(one, len(one.responses))
                while any(one.responses for one in steps):
                    yield [one.responses.pop(0) if one.responses else None for one in steps]
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

    def respond(
        self, entries: Sequence[LocalStep], responses: Sequence[Any], last: Sequence[int], *, are_dicts: bool
    ) -> Any:
        for entry, response in zip(entries, responses, strict=True):
            entry.responses.append(response)
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
