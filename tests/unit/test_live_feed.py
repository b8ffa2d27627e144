"""The feed of the live page: one sampling for all, what has changed and no more, and who may follow."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from http1_talk import Talk
from present import present
from processes import until

from gpuserve.config.settings.server import ServerSettings, TraceSettings
from gpuserve.config.settings.values import AccessRule
from gpuserve.core.errors import Unavailable
from gpuserve.core.event_log import Event, EventKind
from gpuserve.front.live import live_feed
from gpuserve.front.live.live_feed import MAX_SUBSCRIBERS, LiveFeed, LivePage, ShownSettings, live_page
from gpuserve.front.net.async_requests import AsyncRequests
from gpuserve.front.protocols.access.authorization import AccessPolicy
from gpuserve.front.protocols.http.dashboard_endpoints import MAX_UNSENT
from gpuserve.front.protocols.http.http_handler import HttpHandler
from gpuserve.front.service.inference_service import InferenceService, inference_service
from gpuserve.supervisor.control import front_messages as messages


class Listener:
    """A follower that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.has_ended = False

    def take(self, kind: str, document: bytes) -> None:
        self.told.append((kind, json.loads(document)))

    def end(self) -> None:
        self.has_ended = True

    def samples(self) -> list[Any]:
        return [document for kind, document in self.told if kind == "sample"]

    def events(self) -> list[Any]:
        return [one for kind, documents in self.told if kind == "events" for one in documents]

    async def wait_samples(self, count: int) -> list[Any]:
        await until(lambda: len(self.samples()) >= count)
        return self.samples()


@pytest.fixture
def service() -> InferenceService:
    return inference_service(ServerSettings(name="a server"))


@pytest.fixture
def page(service: InferenceService, monkeypatch: pytest.MonkeyPatch) -> LivePage:
    monkeypatch.setattr(live_feed, "SAMPLE_S", 0.01)
    return present(live_page(service, ServerSettings(name="a server"), 3))


def state(service: InferenceService, model: str, version: int, name: str, reason: str = "") -> None:
    service.models.set_states(model, ((version, name, reason),))


@contextlib.asynccontextmanager
async def running(feed: LiveFeed) -> AsyncIterator[None]:
    feed.open()
    task = asyncio.ensure_future(feed.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_all_that_is_there_comes_first_and_then_what_changes(
    service: InferenceService, page: LivePage
) -> None:
    async with running(page.feed):
        listener = Listener()
        state(service, "one", 1, "LOADING")
        state(service, "two", 7, "UNAVAILABLE", "it has no file")
        page.feed.join(listener)
        first, second = (await listener.wait_samples(2))[:2]
        expected = [["one", "1", "LOADING", ""], ["two", "7", "UNAVAILABLE", "it has no file"]]
        assert [[*row.values()] for row in first["models"]] == expected
        assert first["server"]["name"] == "a server"
        assert (first["server"]["state"], first["server"]["restarts"]) == ("STARTING", 2)
        assert (second["models"], second["gone"]) == ([], [])
        state(service, "one", 1, "UNAVAILABLE", "it broke")
        service.models.set_states("two", ())
        count = len(listener.samples())
        later = (await listener.wait_samples(count + 1))[count]
        assert [row["reason"] for row in later["models"]] == ["it broke"]
        assert later["gone"] == [["two", "7"]]


async def test_who_comes_later_is_told_all_without_another_sampling(
    service: InferenceService, page: LivePage
) -> None:
    async with running(page.feed):
        first, later = Listener(), Listener()
        state(service, "one", 1, "LOADING")
        page.feed.join(first)
        await first.wait_samples(2)
        page.feed.join(later)
        (whole,) = later.samples()
        assert [row["name"] for row in whole["models"]] == ["one"]
        assert whole["time"] == first.samples()[-1]["time"]


async def test_nobody_is_told_once_he_has_left_and_nothing_is_sampled_for_nobody(
    service: InferenceService, page: LivePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(page.feed):
        listener = Listener()
        page.feed.join(listener)
        await listener.wait_samples(1)
        page.feed.leave(listener)
        sampled: list[object] = []
        monkeypatch.setattr(page.feed.sampler, "sampling", lambda: sampled.append(1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert sampled == []


async def test_what_happens_is_told_at_once_and_what_had_happened_first(
    service: InferenceService, page: LivePage
) -> None:
    def happened(number: int, kind: EventKind) -> None:
        wire = Event(number, 5.0, kind, "m", 1, "cpu#0", {"reason": "signal 9"}).to_wire()
        service.events.on_events(messages.EventBatch((wire,)))

    async with running(page.feed):
        listener = Listener()
        happened(1, EventKind.INSTANCE_DIED)
        page.feed.join(listener)
        await listener.wait_samples(1)
        happened(2, EventKind.INSTANCE_RESTART)
        assert [one["kind"] for one in listener.events()] == ["instance_died", "instance_restart"]
        assert listener.events()[0]["reason"] == "signal 9"


async def test_so_many_may_follow_and_no_more(page: LivePage) -> None:
    listeners = [Listener() for _ in range(MAX_SUBSCRIBERS)]
    async with running(page.feed):
        for one in listeners:
            page.feed.join(one)
        with pytest.raises(Unavailable, match="64 pages watch this server already"):
            page.feed.join(Listener())
        page.feed.leave(listeners[0])
        page.feed.join(Listener())


async def test_a_server_that_leaves_service_hangs_up_and_lets_them_come_again_until_it_ends(
    service: InferenceService, page: LivePage
) -> None:
    async with running(page.feed):
        listener, again = Listener(), Listener()
        page.feed.join(listener)
        await listener.wait_samples(1)
        service.health.leave_service()
        assert listener.has_ended
        page.feed.join(again)
        assert (await again.wait_samples(1))[0]["server"]["state"] == "LEAVING"
        service.health.drain()
        assert again.has_ended
        with pytest.raises(Unavailable, match="the server ends"):
            page.feed.join(Listener())


def test_a_server_may_be_without_a_page(service: InferenceService) -> None:
    assert live_page(service, ServerSettings(dashboard="off"), 1) is None


async def test_a_page_that_reads_too_slowly_is_let_go_and_nobody_else(
    service: InferenceService, page: LivePage
) -> None:
    async with running(page.feed):
        handler = HttpHandler(service, AsyncRequests(), 1 << 20, AccessPolicy(), live=page)
        slow, quick = Talk(handler=handler.accept), Talk(handler=handler.accept)
        for talk in (slow, quick):
            talk.feed(b"GET /dashboard/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        slow.way.full = True
        await until(lambda: slow.way.said)
        assert slow.way.said == ["close"]
        n_sent = quick.way.sent.count(b"event: sample")
        assert 0 < slow.way.sent.count(b"event: sample") + MAX_UNSENT <= n_sent + 1
        await until(lambda: quick.way.sent.count(b"event: sample") > n_sent)
        assert not quick.way.said


def test_a_model_that_has_just_come_has_an_empty_history_and_an_unknown_one_none(
    service: InferenceService, page: LivePage
) -> None:
    state(service, "one", 1, "LOADING")
    empty = present(page.feed.sampler.history_of(("one", "1")))
    assert (empty["times"], set(map(len, empty["series"].values()))) == ([], {0})
    assert page.feed.sampler.history_of(("", "")) == empty
    assert page.feed.sampler.history_of(("one", "2")) is None


# ---- settings -----------------------------------------------------------------------------------


def test_nothing_secret_is_among_the_settings_that_are_shown() -> None:
    secret = "s3cr3t"
    settings = ServerSettings(
        access_token=secret,
        access_rules=(AccessRule(("trace",), secret),),
        tls_keyfile=f"/{secret}/key.pem",
        tls_certfile=f"/{secret}/cert.pem",
        tls_client_ca=f"/{secret}/ca.pem",
        trace=TraceSettings(url=f"http://user:{secret}@host:4318/v1", resource={"authorization": secret}),
        max_connections=7,
    )
    shown = {one["name"]: one for one in ShownSettings(settings).document()}
    assert secret not in json.dumps(list(shown.values()))
    del shown["access_token"]["description"]
    assert shown["access_token"] == {"name": "access_token", "is_default": False, "is_given": True}
    assert shown["trace.url"]["value"] == "http://host:4318/v1"
    assert (shown["max_connections"]["value"], shown["max_connections"]["is_default"]) == (7, False)
    assert (shown["host"]["value"], shown["host"]["is_default"]) == ("0.0.0.0", True)
    assert not ShownSettings(ServerSettings()).document()[0].keys() & {"is_given"}
