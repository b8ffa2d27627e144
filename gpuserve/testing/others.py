"""The other models that a model under test asks: what answers in their place, and which are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

import numpy as np

from gpuserve_worker.calling.calls import CallReply, OutgoingCalls
from gpuserve_worker.calling.questions import LOAD, READY, CallRequest, ModelCallError, ModelCommand, Question


class Answering(Protocol):
    """A model that answers in place of a server's; ``LocalModel`` is one."""

    def answer_call(self, request: CallRequest) -> list[CallReply]:
        """The replies to a call, the last of which is final."""


#: Another model: one that is local as well, or what is given inputs by name and returns outputs by name.
Other: TypeAlias = Answering | Callable[[dict[str, Any]], Mapping[str, Any]]


class OtherModels:
    """Answers the questions of one model, in the thread that asks; implements ``CallPort``."""

    def __init__(self, others: Mapping[str, Other]) -> None:
        self._others = dict(others)
        self.calls = OutgoingCalls()
        #: The models that are loaded.
        self.loaded = set(self._others)
        #: Every question that was asked.
        self.asked: list[Question] = []

    def add(self, others: Mapping[str, Other]) -> None:
        """Let these answer too, in the place of those that there are of the same names."""
        self._others |= others
        self.loaded |= others.keys()

    def ask(self, call_id: int, question: Question) -> None:
        self.asked.append(question)
        if isinstance(question, ModelCommand):
            replies = [self._obey(question)]
        else:
            # A coroutine may ask, and the other one have an event loop of its own.
            with ThreadPoolExecutor(1) as thread:
                replies = thread.submit(self._replies, question).result()
        for reply in replies:
            self.calls.reply(call_id, reply)

    def call_off(self, call_id: int) -> None:
        """Nothing goes on after a question."""

    def give_back(self, lease: int) -> None:
        """Do nothing: answers of a test lie on its own heap, and no memory is lent."""

    def wait(self, ready: Callable[[], bool]) -> None:
        assert ready(), "every question was answered when it was asked"

    def look(self) -> None:
        """Do nothing: an answer is there when it was asked for, and no link is read."""

    def wakes(self) -> bool:
        return True

    def _obey(self, command: ModelCommand) -> CallReply:
        verb, model, _ = command
        if verb == READY:
            return CallReply(None, {READY: model in self.loaded}, None, True)
        if verb == LOAD and model not in self._others:
            return _failed("INTERNAL", f"failed to load {model!r}: the test names no such other model")
        (self.loaded.add if verb == LOAD else self.loaded.discard)(model)
        return CallReply(None, {}, None, True)

    def _replies(self, request: CallRequest) -> list[CallReply]:
        other = self._others.get(request.model)
        if other is None or request.model not in self.loaded:
            known = ", ".join(sorted(self.loaded)) or "none"
            return [
                _failed(
                    "NOT_FOUND", f"no other model {request.model!r} is loaded in this test; those are {known}"
                )
            ]
        try:
            if not callable(other):
                return other.answer_call(request)
            inputs = {name: np.asarray(value) for name, value in request.inputs.items()}
            outputs = {name: np.asarray(value) for name, value in other(inputs).items()}
        except ModelCallError as error:
            return [CallReply(None, {}, error, True)]
        last = [CallReply(None, {}, None, True)] if request.stream else []
        return [CallReply(outputs, {}, None, not request.stream), *last]


def _failed(code: str, text: str) -> CallReply:
    return CallReply(None, {}, ModelCallError(code, text), True)
