"""The feed of the live page: one sampling for all who watch, once a second while anybody does; and a point of
the history every few seconds, whether or not. Who follows is given whole JSON documents; how they travel, and
what becomes of a slow follower, is not known here::

    sample     {"time", "server", "models", "gone", "gpus", "doors"}    only models that have changed
    events     [{"time", "number", "kind", …}, …]                       as ``Event.document``
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import orjson

from gpuserve.core.errors import Unavailable
from gpuserve.core.event_log import Event
from gpuserve.front.live.sampler import LiveSampler, Sample
from gpuserve.front.observe.history import INTERVAL_S
from gpuserve.front.observe.rates import Of
from gpuserve.front.observe.sliced_page import in_slices
from gpuserve.front.service.events import EventsInFront
from gpuserve.front.service.health import ServerHealth

#: How often who watches is told.
SAMPLE_S: Final = 1.0
#: So many may watch one server at once.
MAX_FOLLOWERS: Final = 64


class Follower(Protocol):
    """Who watches. Called in the loop; must neither block nor raise."""

    def take(self, kind: str, document: bytes) -> None:
        """The next document, of the kind "sample" or "events"."""

    def end(self) -> None:
        """Nothing more comes, for the server leaves service."""


class LiveFeed:
    """The feed of one front, which runs in ``run`` only. ``more`` gives what the ports know of the server and
    of its doors, once there are ports.
    """

    def __init__(
        self, sampler: LiveSampler, health: ServerHealth, events: EventsInFront, server: Mapping[str, Any]
    ) -> None:
        self.sampler = sampler
        self.more: Callable[[], Mapping[str, Any]] = dict
        self._health = health
        self._events = events
        self._server = dict(server)
        self._started_at = time.monotonic()
        self._followers: dict[Follower, None] = {}
        #: The models as they were told last, by name and version.
        self._told: dict[Of, bytes] = {}
        self._rest = b""
        self._came = asyncio.Event()
        self._was_leaving = False

    def open(self) -> None:
        """Subscribe to health and events, once."""
        self._health.watch(self._on_health)
        self._events.recent.subscribe(self._on_event)

    async def run(self) -> None:
        """Sample until the front ends."""
        point_at = 0.0
        while True:
            now = time.monotonic()
            if now >= point_at:
                await in_slices(self.sampler.taking_point(time.time()))
                point_at = now + INTERVAL_S
            if self._followers:
                self._tell(await in_slices(self.sampler.sampling()))
            await self._pause(SAMPLE_S if self._followers else point_at - time.monotonic())

    async def _pause(self, duration_s: float) -> None:
        """Wait, or until somebody comes whom nothing can be told yet."""
        self._came.clear()
        try:
            async with asyncio.timeout(duration_s):
                await self._came.wait()
        except TimeoutError:
            pass

    # ---- who follows ----------------------------------------------------------------------

    def join(self, follower: Follower) -> None:
        """Tell one more, all that there is first. Raises Unavailable: too many watch, or the server ends."""
        if self._health.draining:
            raise Unavailable("the server ends, and nobody can begin to watch it")
        if len(self._followers) >= MAX_FOLLOWERS:
            raise Unavailable(f"{MAX_FOLLOWERS} pages watch this server already, and no more can at once")
        is_first, self._followers[follower] = not self._followers, None
        follower.take("events", _documents(list(self._events.recent)))
        if is_first:  # what was told last is old
            self._told.clear()
            self.sampler.restart()
            self._came.set()
        elif self._rest:
            follower.take("sample", _sample(self._told.values(), (), self._rest))

    def leave(self, follower: Follower) -> None:
        self._followers.pop(follower, None)
        if not self._followers:
            self._rest = b""

    def hang_up(self) -> None:
        """Let nobody wait for more: connections are to end. Who wants to can come again."""
        for follower in list(self._followers):
            self.leave(follower)
            follower.end()

    # ---- what they are told ---------------------------------------------------------------

    def _tell(self, sample: Sample) -> None:
        before, self._told = self._told, {of: orjson.dumps(row) for of, row in sample.models.items()}
        changed = [row for of, row in self._told.items() if before.get(of) != row]
        gone = [list(of) for of in before.keys() - self._told.keys()]
        self._rest = self._rest_of(sample)
        self._send("sample", _sample(changed, gone, self._rest))

    def _rest_of(self, sample: Sample) -> bytes:
        """The members of a sample beside the models, without its braces."""
        health, more = self._health, dict(self.more())
        server = {
            **self._server,
            "state": _state(health),
            "ready": health.ready,
            "uptime_s": round(time.monotonic() - self._started_at),
            **sample.total,
            "connections": more.pop("connections", None),
            "watching": len(self._followers),
        }
        rest = {"time": round(time.time(), 2), "server": server, "gpus": sample.gpus, "doors": [], **more}
        return orjson.dumps(rest)[1:-1]

    def _on_event(self, event: Event) -> None:
        if self._followers:
            self._send("events", _documents([event]))

    def _on_health(self) -> None:
        is_leaving = self._health.leaving
        if is_leaving is not self._was_leaving or self._health.draining:
            self._was_leaving = is_leaving
            self.hang_up()

    def _send(self, kind: str, document: bytes) -> None:
        for follower in list(self._followers):
            follower.take(kind, document)


def _state(health: ServerHealth) -> str:
    if health.draining:
        return "ENDING"
    if health.leaving:
        return "LEAVING"
    return "SERVING" if health.started else "STARTING"


def _sample(models: Any, gone: Any, rest: bytes) -> bytes:
    return b'{"models":[%b],"gone":%b,%b}' % (b",".join(models), orjson.dumps(list(gone)), rest)


def _documents(events: list[Event]) -> bytes:
    return orjson.dumps([one.document() for one in events], default=str)
