"""The adapter from a stepped callable for OpenAI's clients to a stepped inference callable.

``admit`` of the user's callable receives a ``ChatRequest`` or a ``CompletionRequest``, as the annotation of
its parameter says. The result of a step for a request is text, a ``Token``, a ``ToolCall``, a ``Usage`` or a
list of these; ``Last`` ends the answer. Each answer of a request (``n``, several prompts) is a state of its
own, which is admitted when there is room for it.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuserve.model.openai_declaration import REQUEST, annotation_names
from gpuserve.openai.answers import BadRequest, without_frames
from gpuserve.openai.endpoints import (
    REQUESTS,
    OpenAIEndpoint,
    endpoint_of,
    honoured_members,
    parse_body,
    response_of,
)
from gpuserve.openai.text_answer import TextAnswer
from gpuserve_worker.inference.stepping import Last, Later, max_active_of

if TYPE_CHECKING:
    from gpuserve_worker.inference.inference_request import Request


class OpenAIState:
    """One request: its answers, the states of the answers that are generated, and the prompts that wait."""

    def __init__(self, answer: TextAnswer, shape: tuple[int, ...]) -> None:
        self.answer = answer
        self.waiting = deque(enumerate(answer.wanted))
        self.states: dict[int, Any] = {}
        self.shape = shape


class SteppedOpenAI:
    """A stepped inference callable over a user's stepped callable."""

    def __init__(self, made: Any) -> None:
        words = annotation_names(made.admit)
        self._endpoints = [one for one, kind in REQUESTS.items() if kind.__name__ in words]
        if not self._endpoints or OpenAIEndpoint.EMBEDDINGS in self._endpoints:
            raise TypeError(
                "a stepped callable for openai: true needs a parameter of admit annotated with ChatRequest, "
                "CompletionRequest or both of them"
            )
        self._made = made
        self._honours = honoured_members(made)
        self.max_active = max_active_of(made)

    async def admit(self, request: Request) -> OpenAIState:
        endpoint = endpoint_of(request.parameters, self._endpoints)
        parsed = parse_body(request, endpoint, self._honours)
        state = OpenAIState(TextAnswer(parsed), request[REQUEST].shape)
        try:
            await self._admit_waiting(state)
        except BaseException:
            self.release(state)
            raise
        if not state.states:
            raise Later
        return state

    async def step(self, active: Sequence[OpenAIState]) -> list[Any]:
        results: list[Any] = [None] * len(active)
        places: list[tuple[int, int]] = []
        for position, one in enumerate(active):
            if one.waiting:
                try:
                    await self._admit_waiting(one)
                except Exception as error:  # user code may raise anything; the request fails
                    results[position] = without_frames(error)
            places += [(position, index) for index in one.states]
        given = self._made.step([active[position].states[index] for position, index in places])
        if inspect.isawaitable(given):
            given = await given
        if len(given) != len(places):
            raise ValueError(f"step returned {len(given)} results for {len(places)} states")
        documents: list[list[bytes]] = [[] for _ in active]
        for (position, index), result in zip(places, given, strict=True):
            if results[position] is None and result is not None:
                try:
                    documents[position] += self._add(active[position], index, result)
                except (BadRequest, TypeError, ValueError) as error:
                    results[position] = without_frames(error)
                if isinstance(result, Exception):
                    results[position] = result
        for position, one in enumerate(active):
            if results[position] is not None:
                continue
            is_over = not (one.states or one.waiting)
            if is_over:
                documents[position] += one.answer.end()
            responses = [response_of(document, one.shape) for document in documents[position]]
            results[position] = Last(responses) if is_over else responses or None
        return results

    def release(self, state: OpenAIState) -> None:
        for index in list(state.states):
            self._release(state, index)

    async def _admit_waiting(self, state: OpenAIState) -> None:
        """Admit the answers of a request for which there is room."""
        while state.waiting:
            index, request = state.waiting[0]
            try:
                inner = self._made.admit(request)
                if inspect.isawaitable(inner):
                    inner = await inner
            except Later:
                return
            state.waiting.popleft()
            state.states[index] = inner

    def _add(self, state: OpenAIState, index: int, result: Any) -> list[bytes]:
        """Add the result of a step to an answer. Return the documents of a stream."""
        is_last = type(result) is Last
        if is_last:
            result = result.response
        if isinstance(result, Exception):
            return []
        values = result if isinstance(result, list) else [] if result is None else [result]
        documents = state.answer.add(index, values, is_last=is_last)
        if state.answer.is_over(index):
            self._release(state, index)
        return documents

    def _release(self, state: OpenAIState, index: int) -> None:
        inner = state.states.pop(index)
        release = getattr(self._made, "release", None)
        if release is not None:
            release(inner)
