"""A ``model.py`` with ``sequence_batching { iterative_sequence: true }``, as a stepped callable.

A step calls ``execute`` with the active requests. A request that ``execute`` reschedules is in the next step,
beside new requests. Any other request is released: ``execute`` does not receive it again, and it ends with
its final response, or when its response sender is deleted.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from gpuserve.backends.python_backend.execution import ExecutedModel, event_setter, send_returned
from gpuserve.backends.python_backend.inference_requests import ReceivedRequest
from gpuserve.backends.python_backend.responses import BatchResponseQueue
from gpuserve.backends.sequences import iterative_slots
from gpuserve_worker.inference.inference_request import Request
from gpuserve_worker.inference.stepping import Last
from gpuserve_worker.protocol.payloads import Sequence as RequestSequence
from gpuserve_worker.protocol.tensor import numpy_dtype

#: How long a step waits for responses of released requests if no other request is active. New requests join
#: after this time at the latest.
_WAIT_S: Final = 0.005
_FLAG_FIELDS: Final = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_PREFIX: Final = "CONTROL_SEQUENCE_"


@dataclass(eq=False, slots=True)
class IterativeState:
    """An active request. ``received`` is None once the request is released; ``answers`` are not sent yet."""

    origin: Request
    received: ReceivedRequest | None
    responses: BatchResponseQueue
    answers: deque[Any] = field(default_factory=deque)
    is_over: bool = False


class IterativeModel(ExecutedModel):
    """A stepped callable over a ``TritonPythonModel``, of which ``config`` is the ``ModelConfig``."""

    def __init__(
        self,
        model: Any,
        outputs: Collection[str],
        instance: str,
        config: Mapping[str, Any],
        *,
        decoupled: bool,
    ) -> None:
        super().__init__(model, outputs, instance)
        self.max_active = iterative_slots(config)
        self._decoupled = decoupled
        rows = int(config.get("max_batch_size", 0))
        self._size = max(1, rows)
        self._controls = _Controls(config["sequence_batching"].get("control_input", ()), bool(rows))
        self._ids = itertools.count(1)
        self._sent = asyncio.Event()

    def admit(self, request: Request) -> IterativeState:
        sequence = request.sequence
        number = next(self._ids) if sequence is None else sequence.id
        request.sequence = RequestSequence(number, True, False)
        request.data |= self._controls.first(number)
        responses = BatchResponseQueue(1, self._outputs, event_setter(self._sent), decoupled=self._decoupled)
        (received,) = self._receive([request], responses)
        return IterativeState(request, received, responses)

    async def step(self, active: Sequence[IterativeState]) -> list[Any]:
        runs = [one for one in active if one.received is not None and not one.answers]
        if not runs and not any(one.answers for one in active):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._sent.wait(), _WAIT_S)
            self._sent.clear()
        for start in range(0, len(runs), self._size):
            await self._execute_batch(runs[start : start + self._size])
        return [self._result(one) for one in active]

    def release(self, state: IterativeState) -> None:
        state.origin.cancelled = True  # a thread of the model may still work on the request
        state.responses.close()
        state.received = None

    async def _execute_batch(self, states: Sequence[IterativeState]) -> None:
        received = [one.received for one in states if one.received is not None]
        again = set[int]()
        try:
            returned = self._execute(received)
            if inspect.isawaitable(returned):
                returned = await returned
            find = self.rescheduled_of if self._decoupled else send_returned
            again = set(map(id, find(returned, received)))
        except Exception as error:  # user code may raise anything
            for request in received:
                request.get_response_sender().fail(error)
        for state, request in zip(states, received, strict=True):
            if id(request) not in again:
                state.received = None
            elif state.origin.sequence is not None and state.origin.sequence.start:
                state.origin.sequence = state.origin.sequence._replace(start=False)
                state.origin.data |= self._controls.later

    def _result(self, state: IterativeState) -> Any:
        """Return the result of a step for a request: the responses that it has sent, up to an error."""
        answers, responses = state.answers, state.responses
        if self._decoupled:
            while step := responses.next_step():
                answers += step
            state.is_over = step is not None
        elif (whole := responses.all_answers()) is not None:
            answers += whole
            state.is_over = True
        found = []
        while answers and not isinstance(answers[0], Exception):
            found.append(answers.popleft())
        if answers:
            return found or answers.popleft()
        result = found[0] if len(found) == 1 else found
        return Last(result) if state.is_over else result or None


class _Controls:
    """The control inputs of an iterative model: those of a ``first`` execution, and the ``later`` changes."""

    def __init__(self, declared: Sequence[Mapping[str, Any]], batching: bool) -> None:
        self._shape = (1, 1) if batching else (1,)
        self._first: dict[str, Any] = {}
        self.later: dict[str, Any] = {}
        self._ids: list[tuple[str, Any]] = []
        for one in declared:
            name, control = one["name"], one["control"][0]
            kind = control.get("kind", f"{_PREFIX}START").removeprefix(_PREFIX)
            if kind == "CORRID":
                datatype = control["data_type"].removeprefix("TYPE_")
                self._ids.append((name, object if datatype == "STRING" else numpy_dtype(datatype)))
                continue
            key, datatype = next(pair for pair in _FLAG_FIELDS.items() if control.get(pair[0]))
            false, true = (np.full(self._shape, value, numpy_dtype(datatype)) for value in control[key])
            self._first[name] = false if kind == "END" else true
            if kind == "START":
                self.later[name] = false

    def first(self, number: int | str) -> dict[str, Any]:
        ids = {
            name: np.full(self._shape, str(number).encode() if dtype is object else number, dtype)
            for name, dtype in self._ids
        }
        return self._first | ids
