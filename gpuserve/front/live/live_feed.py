"""The live feed: one sampling for all subscribers, once a second while there are any, and a point of the
history every few seconds in any case.

Subscribers receive complete JSON documents; their transport, and the handling of slow subscribers, are
elsewhere::

    sample     {"time", "server", "models", "gone", "gpus", "doors"}    only models that have changed
    events     [{"time", "number", "kind", …}, …]                       as ``Event.document``
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import Unavailable
from gpuserve.core.event_log import Event
from gpuserve.devices.names import OFF
from gpuserve.front.live.live_sampler import LiveSampler, Sample
from gpuserve.front.observability.metrics.rates import INTERVAL_S, ModelKey
from gpuserve.front.observability.time_slices import run_in_slices
from gpuserve.front.service.inference_service import FrontEventLog, InferenceService
from gpuserve.front.service.server_health import ServerHealth
from gpuserve.model.options import OptionRow, rows

#: The sampling period while there are subscribers.
SAMPLE_S: Final = 1.0
#: Limit of subscribers of one server.
MAX_SUBSCRIBERS: Final = 64


class LiveSubscriber(Protocol):
    """A subscriber to the live feed. Called on the event loop, so it must not block or raise."""

    def take(self, kind: str, document: bytes) -> None:
        """Receive the next document, of the kind "sample" or "events"."""

    def end(self) -> None:
        """Handle the end of the feed: the server leaves service."""


class LiveFeed:
    """The feed of one front, active in ``run``. ``more`` returns the values of its listeners."""

    def __init__(
        self, sampler: LiveSampler, health: ServerHealth, events: FrontEventLog, server: Mapping[str, Any]
    ) -> None:
        self.sampler = sampler
        self.more: Callable[[], Mapping[str, Any]] = dict
        self._health = health
        self._events = events
        self._server = dict(server)
        self._started_at = time.monotonic()
        self._subscribers: dict[LiveSubscriber, None] = {}
        #: The models as they were sent last, by name and version.
        self._sent_rows: dict[ModelKey, bytes] = {}
        self._rest = b""
        self._joined = asyncio.Event()
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
                await run_in_slices(self.sampler.taking_point(time.time()))
                point_at = now + INTERVAL_S
            if self._subscribers:
                self._publish_sample(await run_in_slices(self.sampler.sampling()))
            await self._pause(SAMPLE_S if self._subscribers else point_at - time.monotonic())

    async def _pause(self, duration_s: float) -> None:
        self._joined.clear()
        try:
            async with asyncio.timeout(duration_s):
                await self._joined.wait()
        except TimeoutError:
            pass

    # ---- subscribers --------------------------------------------------------------------------

    def join(self, subscriber: LiveSubscriber) -> None:
        """Add a subscriber, and send it all values. Raise Unavailable for too many or while draining."""
        if self._health.draining:
            raise Unavailable("the server ends, and nobody can begin to watch it")
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise Unavailable(f"{MAX_SUBSCRIBERS} pages watch this server already, and no more can at once")
        is_first, self._subscribers[subscriber] = not self._subscribers, None
        subscriber.take("events", _documents(list(self._events.recent)))
        if is_first:  # the values sent last are old
            self._sent_rows.clear()
            self.sampler.restart()
            self._joined.set()
        elif self._rest:
            subscriber.take("sample", _sample(self._sent_rows.values(), (), self._rest))

    def leave(self, subscriber: LiveSubscriber) -> None:
        self._subscribers.pop(subscriber, None)
        if not self._subscribers:
            self._rest = b""

    def hang_up(self) -> None:
        """End all subscriptions, because connections are to close. Subscribers may join again."""
        for subscriber in list(self._subscribers):
            self.leave(subscriber)
            subscriber.end()

    # ---- documents --------------------------------------------------------------------------

    def _publish_sample(self, sample: Sample) -> None:
        before = self._sent_rows
        self._sent_rows = {of: orjson.dumps(row) for of, row in sample.models.items()}
        changed = [row for of, row in self._sent_rows.items() if before.get(of) != row]
        gone = [list(of) for of in before.keys() - self._sent_rows.keys()]
        self._rest = self._rest_of(sample)
        self._send("sample", _sample(changed, gone, self._rest))

    def _rest_of(self, sample: Sample) -> bytes:
        """Return the members of a sample other than the models, without its braces."""
        health, more = self._health, dict(self.more())
        server = {
            **self._server,
            "state": _state(health),
            "ready": health.ready,
            "uptime_s": round(time.monotonic() - self._started_at),
            **sample.total,
            "connections": more.pop("connections", None),
            "watching": len(self._subscribers),
        }
        rest = {"time": round(time.time(), 2), "server": server, "gpus": sample.gpus, "doors": [], **more}
        return orjson.dumps(rest)[1:-1]

    def _on_event(self, event: Event) -> None:
        if self._subscribers:
            self._send("events", _documents([event]))

    def _on_health(self) -> None:
        is_leaving = self._health.leaving
        if is_leaving is not self._was_leaving or self._health.draining:
            self._was_leaving = is_leaving
            self.hang_up()

    def _send(self, kind: str, document: bytes) -> None:
        for subscriber in list(self._subscribers):
            subscriber.take(kind, document)


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


# ---- the page and its settings -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LivePage:
    """The feed that all live pages share, and the settings that they show."""

    feed: LiveFeed
    settings: ShownSettings


def live_page(service: InferenceService, settings: ServerSettings, epoch: int) -> LivePage | None:
    """Return the live page of a front, which is the server's ``epoch``-th, or None if the page is off."""
    if settings.dashboard == OFF:
        return None
    sampler = LiveSampler(service.models, service.control.gpus, time.monotonic)
    server = {**service.metadata(), "pid": os.getpid(), "restarts": epoch - 1}
    del server["extensions"]
    return LivePage(LiveFeed(sampler, service.health, service.events, server), ShownSettings(settings))


#: Settings with paths of keys and certificates, or with secrets of other services. Only whether they are set
#: is shown.
_WITHHELD: Final = frozenset({"tls_certfile", "tls_client_ca", "tls_keyfile", "trace.resource"})


class ShownSettings:
    """The settings in force ``now`` without secrets: no tokens, key paths, headers or trace values."""

    def __init__(self, now: ServerSettings) -> None:
        self.now = now

    def document(self) -> list[dict[str, Any]]:
        """Return each setting with its value, or whether it is set, and whether that is the default."""
        return list(_setting_rows(self.now, ""))


def _setting_rows(table: Any, prefix: str) -> Iterator[dict[str, Any]]:
    for name, row in rows(type(table)).items():
        value = getattr(table, name)
        if dataclasses.is_dataclass(value):
            yield from _setting_rows(value, f"{prefix}{name}.")
        else:
            yield _setting(prefix + name, row, value)


def _setting(name: str, row: OptionRow, value: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": name, "is_default": value == row.default}
    if row.option.secret or name in _WITHHELD:
        shown["is_given"] = value not in (None, (), {})
    else:
        shown["value"] = _without_user(value) if isinstance(value, str) else value
    return shown | {"description": row.option.description}


def _without_user(text: str) -> str:
    """Return a URL without user name and password; any other text unchanged."""
    if "@" not in text or "://" not in text:
        return text
    try:
        parts = urllib.parse.urlsplit(text)
    except ValueError:
        return ""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
