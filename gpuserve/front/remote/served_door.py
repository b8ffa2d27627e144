"""All that the front does for one door that is a process of its own, by what the door says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpuserve.front.exchange.exchange import Accept
from gpuserve.front.passage import messages
from gpuserve.front.passage.forwarded import ForwardedExchanges
from gpuserve.front.passage.passage import Passage
from gpuserve.front.remote.mirror import ModelMirror
from gpuserve.front.remote.requests import DoorRequests
from gpuserve.front.service.inference_service import InferenceService


class ServedDoor:
    """Answers what a door passes on by ``accept``, runs its requests, and from ``open`` on tells it of
    models. ``obey`` says who takes which of its messages.
    """

    def __init__(self, service: InferenceService, accept: Accept, passage: Passage) -> None:
        trace = service.control.trace
        self._exchanges = ForwardedExchanges(passage, accept)
        self._requests = DoorRequests(passage, service.inference, trace.receptions)
        self._mirror = ModelMirror(passage, service.models, service.health, trace)
        self.obey: Mapping[type, Callable[[Any], None]] = {**self._exchanges.obey, **self._requests.obey}

    def open(self) -> None:
        """Begin to tell the door of models, once it knows its settings."""
        self._mirror.open()

    def attach(self, message: messages.DoorSegment, fds: list[int]) -> None:
        """Map a segment of the door's arena; its descriptor stays the caller's."""
        self._requests.loans.attach(message, fds)

    def close(self) -> None:
        """The door is gone: what it has passed on is abandoned, and what it asked is taken back."""
        self._mirror.close()
        self._exchanges.close()
        self._requests.close()
