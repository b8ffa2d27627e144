"""HTTP endpoints of the dashboard (the live page) and the index at ``/``. Access was checked before."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any, Final

import orjson

from gpuserve.core.errors import NotFound
from gpuserve.front.live.live_feed import LivePage
from gpuserve.front.net.async_requests import AsyncRequest
from gpuserve.front.net.exchange import AnswerHead, Exchange, wake
from gpuserve.front.protocols.access.authorization import (
    SITE,
    AccessPolicy,
    Verdict,
    address_of,
    is_local_client,
)
from gpuserve.front.protocols.access.endpoints import Endpoint, Route
from gpuserve.front.protocols.http.async_inference import start_events
from gpuserve.front.protocols.http.http_responses import JSON_OK, AsyncEndpoint, HttpAnswer
from gpuserve.front.protocols.http.static_pages import GUARDS, dashboard_files
from gpuserve.front.requests.json_values import compact
from gpuserve.front.requests.limits import shown

#: Events that may wait for a page that reads slowly; above this the page is disconnected, and may reconnect.
MAX_UNSENT: Final = 5
_HTML: Final = b"text/html"
_PAGE: Final = "page.html"
_JSON: Final = (b"content-type", b"application/json")
_PRIVATE: Final = AnswerHead(200, (_JSON, (b"cache-control", b"no-store"), *GUARDS))
_INDEX: Final = AnswerHead(200, (*JSON_OK.headers, (b"vary", b"accept")))
_HEALTH_LINKS: Final = {one: f"/v2/health/{one}" for one in ("live", "ready", "startup")}
#: The index at ``/`` of each kind of port.
_METRICS_LINKS: Final = {"metrics": "/metrics"} | _HEALTH_LINKS
METRICS_INDEX: Final = {"message": "gpuserve tells its metrics here", "links": _METRICS_LINKS}
HEALTH_INDEX: Final = {"message": "gpuserve tells its health here", "links": _HEALTH_LINKS}
_OFF: Final = "the live page is switched off (dashboard: off)"
_ELSEWHERE: Final = (
    "the live page is for browsers on this machine, without a proxy between (dashboard: local)"
)
_LINKS: Final = {
    "server": "/v2",
    "models": "/v2/models",
    **_HEALTH_LINKS,
    "statistics": "/v2/models/stats",
    "metrics": "/metrics",
    "gpus": "/v2/gpus",
    "openai": "/v1/models",
    "description": "/openapi.json",
    "docs": "/docs",
}


def dashboard_endpoints(live: LivePage | None, policy: AccessPolicy) -> dict[Endpoint, AsyncEndpoint]:
    """Return the endpoints of a server with or without a live page, which ``policy`` protects."""
    root = partial(_root, policy if live is not None else None)
    return {Endpoint.ROOT: root, **({} if live is None else DashboardEndpoints(live).awaiting)}


async def _root(policy: AccessPolicy | None, _route: Route, request: AsyncRequest) -> HttpAnswer:
    reason = _OFF if policy is None else _reason_for_no_page(policy, request.exchange)
    wants_html = any(name == b"accept" and _HTML in value for name, value in request.head.headers)
    if not reason and wants_html:
        return HttpAnswer(*dashboard_files()[_PAGE])
    message = f"gpuserve serves models here; {reason or 'the live page is at / for browsers'}"
    return HttpAnswer(_INDEX, compact({"message": message, "links": _LINKS}).encode())


def _reason_for_no_page(policy: AccessPolicy, exchange: Exchange) -> str:
    """Return why a client may not see the page, or "". A client that needs a token enters it on the page."""
    # The link that leads to the page does not matter: the page itself has no data.
    headers = [one for one in exchange.head.headers if one[0] != SITE]
    local = is_local_client(address_of(exchange.endpoints), headers)
    verdict = policy.judge(Endpoint.DASHBOARD_LIVE.access, headers, is_local=local)
    return "" if verdict in {Verdict.ALLOWED, Verdict.NO_TOKEN} else _ELSEWHERE


class DashboardEndpoints:
    """The endpoints with the files and data of the page."""

    def __init__(self, live: LivePage) -> None:
        self._live = live
        self.awaiting: dict[Endpoint, AsyncEndpoint] = {
            Endpoint.DASHBOARD_FILE: self._file,
            Endpoint.DASHBOARD_LIVE: self._send_events,
            Endpoint.DASHBOARD_HISTORY: self._history,
            Endpoint.DASHBOARD_CONFIG: self._config,
        }

    async def _file(self, _route: Route, request: AsyncRequest) -> HttpAnswer:
        name = request.head.path.rpartition("/")[2]
        if name not in dashboard_files():
            raise NotFound(f"the live page has no file '{shown(name)}'")
        return HttpAnswer(*dashboard_files()[name])

    async def _history(self, route: Route, _request: AsyncRequest) -> HttpAnswer:
        found = self._live.feed.sampler.history_of(route.version)
        if found is None:
            name, version = map(shown, route.version)
            raise NotFound(f"there is no history of model '{name}' version {version}")
        return _private(found)

    async def _config(self, _route: Route, _request: AsyncRequest) -> HttpAnswer:
        return _private({"settings": self._live.settings.document()})

    async def _send_events(self, _route: Route, request: AsyncRequest) -> None:
        """Send the feed as server-sent events until the client leaves or the feed ends."""
        exchange = request.exchange
        page = EventFollower(exchange)
        self._live.feed.join(page)
        try:
            start_events(exchange)
            while (data := await page.next(request)) is not None:
                exchange.send(data)
                await exchange.room()
            exchange.finish()
        finally:
            self._live.feed.leave(page)


class EventFollower:
    """A client that follows the feed, and the events not sent to it yet."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._unsent: deque[bytes] = deque()
        self._has_ended = False
        self._changed: asyncio.Future[None] | None = None

    def take(self, kind: str, document: bytes) -> None:
        if len(self._unsent) >= MAX_UNSENT:
            self._unsent.clear()
            self._exchange.reset()
            self.end()
            return
        self._unsent.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), document))
        wake(self._changed)

    def end(self) -> None:
        self._has_ended = True
        wake(self._changed)

    async def next(self, client: AsyncRequest) -> bytes | None:
        """Return the events to send, at least one, or None after the last. Raise ClientGone."""
        while not (self._unsent or self._has_ended):
            self._changed = asyncio.get_running_loop().create_future()
            await client.wait_unless_gone(self._changed)
        data = b"".join(self._unsent)
        self._unsent.clear()
        return data or None


def _private(document: Any) -> HttpAnswer:
    return HttpAnswer(_PRIVATE, orjson.dumps(document))
