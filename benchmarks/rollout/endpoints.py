"""The endpoint list, and how late each consumer hears of a change.

Not here: which pods belong into it (``deployment.py``), and what a consumer does with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, Protocol


class Endpoint(NamedTuple):
    """The address of a pod that takes requests."""

    pod: str
    address: str
    http_port: int
    grpc_port: int


Consumer = Callable[[Sequence[Endpoint]], None]


class CallLater(Protocol):
    """The type of ``loop.call_later``."""

    def __call__(self, delay_s: float, callback: Callable[[], None], /) -> object: ...


class Endpoints:
    """The list as it is, and as every consumer knows it: each change takes its own time to each of them."""

    def __init__(self, max_delay_s: float, random: Random, call_later: CallLater | None = None) -> None:
        self.max_delay_s = max_delay_s
        self.now: tuple[Endpoint, ...] = ()
        self._random = random
        self._call_later = call_later
        self._subscriptions: list[_Subscription] = []
        self._version = 0

    def subscribe(self, consumer: Consumer) -> None:
        """Call it in the event loop: soon with the list of now, then with every list that reaches it."""
        subscription = _Subscription(consumer)
        self._subscriptions.append(subscription)
        self._send(subscription, 0.0)

    def publish(self, endpoints: Sequence[Endpoint]) -> None:
        """The list has changed. A list that is overtaken by a newer one is never seen, as in a watch."""
        if tuple(endpoints) == self.now:
            return
        self.now = tuple(endpoints)
        self._version += 1
        for subscription in self._subscriptions:
            self._send(subscription, self._random.uniform(0.0, self.max_delay_s))

    def _send(self, subscription: _Subscription, delay_s: float) -> None:
        version, endpoints = self._version, self.now
        call_later = self._call_later or asyncio.get_running_loop().call_later
        call_later(delay_s, lambda: subscription.take(version, endpoints))


class _Subscription:
    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._version = -1

    def take(self, version: int, endpoints: Sequence[Endpoint]) -> None:
        if version > self._version:
            self._version = version
            self._consumer(endpoints)
