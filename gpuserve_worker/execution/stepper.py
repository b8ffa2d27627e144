"""The requests of a stepped callable, from their arrival to their end. No I/O: a ``StepSink`` makes the
requests and sends the results.

::

    arrive ──► waiting ──admit──► active ──Last, an error, cancel──► release, ended
                  │                 │  ▲
                  │ Later           ▼  │ credit
                  ▼                paused
               postponed

``release`` is called once for each admitted request, before its end is reported.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from gpuserve_worker.inference.outputs import OutputError, named_outputs
from gpuserve_worker.inference.stepping import Last, Later, SteppedCallable

#: The state of a request that is not admitted yet, or is released.
_NO_STATE: Final = object()
#: The types of responses of a step in which each request has one, as mappings or as arrays.
_RESPONSES: Final[set[type]] = {dict}
_ARRAYS: Final[set[type]] = {np.ndarray}


class StepRequest:
    """A request at a stepped callable.

    ``credit`` is the number of responses that may still be sent; a request without credit is paused.
    ``has_sent``: a response was made.
    """

    __slots__ = ("cancelled", "credit", "has_sent", "state")

    def __init__(self, credit: int) -> None:
        self.credit = credit
        self.has_sent = False
        self.cancelled = False
        self.state: Any = _NO_STATE


Entry = TypeVar("Entry", bound=StepRequest)


Failure = TypeVar("Failure")


class StepSink(Protocol[Entry, Failure]):
    """The side of a ``Stepper`` that knows messages. Each request ends with one call of ``ended``,
    ``failed``, ``cancelled``, ``postponed`` or ``retry``.
    """

    def request_of(self, entry: Entry) -> Any:
        """Return the request for ``admit``. Raise anything if its inputs cannot be read."""

    def respond(
        self, entries: Sequence[Entry], responses: Sequence[Any], last: Sequence[int], *, are_dicts: bool
    ) -> Sequence[tuple[Entry, Failure]]:
        """Send a response to each of these requests, the last one at the positions ``last``. Return the
        requests whose responses cannot be sent. ``are_dicts``: all responses are plain dicts.
        """

    def stepped(self, busy_ns: int, active: int) -> None:
        """Count a step of ``active`` requests that took ``busy_ns``, before its responses are sent."""

    def failure(self, error: Exception, entry: Entry | None = None) -> Failure:
        """Log an exception of the callable, at ``entry`` or at all requests, and return the failure that
        clients receive.
        """

    def ended(self, entry: Entry) -> None:
        """Report the end of a request whose last response was sent, or that has none."""

    def failed(self, entry: Entry, failure: Failure) -> None:
        """Report a request that failed."""

    def cancelled(self, entry: Entry) -> None:
        """Report the end of a cancelled request."""

    def postponed(self, entries: Sequence[Entry]) -> None:
        """Return requests that were not admitted, in the order of their arrival."""

    def retry(self, entry: Entry, failure: Failure) -> None:
        """Return a request to run once more alone, or fail it if it must not run again."""

    def release_failed(self, error: Exception) -> None:
        """Report an exception of ``release``."""


class Stepper(Generic[Entry, Failure]):
    """The step loop of one callable. ``admit_waiting`` and ``step`` alternate; everything else may be called
    at any time in the same thread.
    """

    def __init__(
        self, made: SteppedCallable[Any], sink: StepSink[Entry, Failure], output_names: Sequence[str]
    ) -> None:
        self._output_names = tuple(output_names)
        self._admit = made.admit
        self._step = made.step
        self._release: Callable[[Any], object] | None = getattr(made, "release", None)
        self._sink = sink
        self.waiting: deque[Entry] = deque()
        #: In the order of admission.
        self.active: list[Entry] = []
        self._ready: list[Entry] = []
        self._states: list[Any] = []
        #: Whether ``_ready`` must be computed again.
        self._changed = False
        self._any_cancelled = False
        #: Steps in which each ready request had one response: their responses are taken from the credits
        #: together, after ``_least_credit`` steps at the latest.
        self._unsettled = self._least_credit = 0

    def arrive(self, entry: Entry) -> None:
        self.waiting.append(entry)

    def cancel(self, entry: Entry) -> None:
        """Cancel a request; ``admit_waiting`` removes it."""
        entry.cancelled = self._any_cancelled = True

    def add_credit(self, entry: Entry, responses: int) -> None:
        self._changed |= entry.credit <= 0
        entry.credit += responses

    @property
    def has_changes(self) -> bool:
        """Return whether requests wait or were cancelled since the last ``admit_waiting``."""
        return bool(self.waiting or self._any_cancelled)

    @property
    def has_work(self) -> bool:
        return bool(self.has_changes or self.ready)

    @property
    def ready(self) -> list[Entry]:
        """The active requests that are not paused."""
        if self._changed:
            self._changed = False
            self._settle()
            self._ready = [one for one in self.active if one.credit > 0]
            self._states = [one.state for one in self._ready]
            self._least_credit = min([one.credit for one in self._ready], default=0)
        return self._ready

    async def admit_waiting(self) -> None:
        """Remove cancelled requests, and admit those that wait."""
        if self._any_cancelled:
            self._remove_cancelled()
        while self.waiting:
            entry = self.waiting.popleft()
            failure: Failure | None = None
            try:
                state = self._admit(self._sink.request_of(entry))
                if inspect.isawaitable(state):
                    state = await _uncancelled(state)
            except Later:
                state = _NO_STATE
            except Exception as error:  # user code may raise anything; the request fails
                state, failure = _NO_STATE, self._sink.failure(error, entry)
            # Here no traceback refers to the inputs any more.
            if failure is not None:
                self._sink.failed(entry, failure)
            elif state is _NO_STATE:
                self._postpone(entry)
                return
            else:
                self._add(entry, state)

    async def step(self) -> None:
        """Call ``step`` for the ready requests, and send the results."""
        entries, failure = self.ready, None
        results: Any = ()
        began_ns = perf_counter_ns()
        try:
            results = self._step(self._states.copy())
            if type(results) is not list and inspect.isawaitable(results):
                results = await _uncancelled(results)
            _check(results, len(entries))
        except Exception as error:  # user code may raise anything
            failure = self._sink.failure(error)
        self._sink.stepped(perf_counter_ns() - began_ns, len(entries))
        if failure is None:
            self._process(entries, results)
        else:
            self._step_failed(entries, failure)

    def _process(self, entries: list[Entry], results: Sequence[Any]) -> None:
        """Send the results of a step, and end the requests that have ended."""
        kinds, responses = set(map(type, results)), results
        last: tuple[int, ...] = ()
        if Last in kinds:
            last = tuple([at for at, one in enumerate(results) if type(one) is Last])
            responses = list(results)
            for at in last:
                responses[at] = results[at].response
            kinds = set(map(type, responses))
        if kinds == _ARRAYS and len(self._output_names) == 1:
            (name,) = self._output_names
            responses, kinds = [{name: one} for one in responses], _RESPONSES
        ended = [entries[at] for at in last]
        failed: list[tuple[Entry, Failure]] = []
        if kinds != _RESPONSES:
            entries, responses, last = self._sorted(entries, responses, set(last), failed)
            kinds = set(map(type, responses))
            self._settle()
            for entry in entries:
                entry.has_sent = True
                entry.credit -= 1
            self._changed = True
        else:
            self._unsettled += 1
            self._changed |= self._unsettled >= self._least_credit
        if entries:
            failed += self._sink.respond(entries, responses, last, are_dicts=kinds == _RESPONSES)
        self._end(failed, ended)

    def _sorted(
        self, entries: Sequence[Entry], results: Sequence[Any], ended: set[int], failed: list[Any]
    ) -> tuple[list[Entry], list[Any], tuple[int, ...]]:
        """Return the requests with a response, each response by name, and the positions of last responses.
        Add requests with an error to ``failed``.
        """
        responding: list[Entry] = []
        responses: list[Any] = []
        last: list[int] = []
        for at, (entry, result) in enumerate(zip(entries, results, strict=True)):
            if isinstance(result, Exception):
                failed.append((entry, self._sink.failure(result, entry)))
            elif result is not None:
                try:
                    named = self._named(result)
                except OutputError as error:
                    failed.append((entry, self._sink.failure(error, entry)))
                    continue
                responding += [entry] * len(named)
                responses += named
                if named and at in ended:
                    last.append(len(responses) - 1)
        return responding, responses, tuple(last)

    def _end(self, failed: Iterable[tuple[Entry, Failure]], ended: Iterable[Entry]) -> None:
        for entry, failure in failed:
            if self._remove(entry):  # else another of its responses has failed
                self._sink.failed(entry, failure)
        for entry in ended:
            if self._remove(entry):
                self._sink.ended(entry)

    def _named(self, result: Any) -> list[Mapping[str, Any]]:
        """Return the responses in a result by name. Raise OutputError if one of them is no response."""
        names, several = self._output_names, result if type(result) is list else [result]
        return [one if type(one) is dict else named_outputs(one, names) for one in several]

    def _settle(self) -> None:
        """Take the responses of steps in which each ready request had one from the credits."""
        count, self._unsettled = self._unsettled, 0
        if count:
            for entry in self._ready:
                entry.has_sent = True
                entry.credit -= count

    def _step_failed(self, entries: list[Entry], failure: Failure) -> None:
        """End the requests of a failed step. Those without a response run once more, each alone."""
        is_alone = len(entries) == 1
        self._settle()
        self._states = []
        for entry in tuple(entries):
            self._remove(entry)
            if entry.has_sent or is_alone:
                self._sink.failed(entry, failure)
            else:
                self._sink.retry(entry, failure)

    def _add(self, entry: Entry, state: Any) -> None:
        entry.state = state
        self.active.append(entry)
        self._changed = True
        if entry.cancelled:  # while ``admit`` was awaited
            self._remove_cancelled()

    def _postpone(self, entry: Entry) -> None:
        if self.active:
            self._sink.postponed([entry, *self.waiting])
            self.waiting.clear()
            return
        error = OutputError("admit raised Later although no request was active")
        self._sink.failed(entry, self._sink.failure(error, entry))

    def _remove_cancelled(self) -> None:
        self._any_cancelled = False
        for entry in [one for one in (*self.waiting, *self.active) if one.cancelled]:
            if entry.state is _NO_STATE:
                self.waiting.remove(entry)
            else:
                self._remove(entry)
            self._sink.cancelled(entry)

    def _remove(self, entry: Entry) -> bool:
        """Release an active request. Return False if it was released before."""
        state, entry.state = entry.state, _NO_STATE
        if state is _NO_STATE:
            return False
        self.active.remove(entry)
        self._changed = True
        if self._release is not None:
            try:
                self._release(state)
            except Exception as error:  # user code may raise anything; the request has its result
                self._sink.release_failed(error)
        return True

    def cancel_all(self) -> None:
        """Cancel all requests; ``admit_waiting`` removes them."""
        for entry in (*self.waiting, *self.active):
            self.cancel(entry)

    def close(self) -> None:
        """Cancel and release all requests, after the last step."""
        self.cancel_all()
        self._remove_cancelled()


def _check(results: Any, count: int) -> None:
    if not isinstance(results, Sequence):
        kind = type(results).__name__
        raise OutputError(f"step must return a list with one result for each state, but returned {kind}")
    if len(results) != count:
        raise OutputError(f"step returned {len(results)} results for {count} states")


async def _uncancelled(result: Awaitable[Any]) -> Any:
    """Return an awaited result. A cancellation from inside user code is an error of the user code."""
    try:
        return await result
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("the inference callable was cancelled from within") from None
