"""The endpoints of the live page, and what stands at ``/`` for everybody else. Part of the HTTP door. Who may
ask the endpoints that tell anything is judged before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any, Final

import orjson

from gpuserve.core.errors import NotFound
from gpuserve.front.doors.access.endpoints import Endpoint
from gpuserve.front.doors.access.peers import SITE, address_of, is_local
from gpuserve.front.doors.access.restrictions import Policy, Verdict
from gpuserve.front.doors.access.routes import Route
from gpuserve.front.doors.http.answers import JSON_OK, HttpAnswer
from gpuserve.front.doors.http.awaited_inference import start_events
from gpuserve.front.doors.http.control import Awaiting
from gpuserve.front.doors.http.dashboard_page import GUARDS, files
from gpuserve.front.exchange.awaited import AwaitedRequest
from gpuserve.front.exchange.exchange import AnswerHead, Exchange, Head
from gpuserve.front.observability.live.live_feed import LivePage
from gpuserve.front.requests.json_values import compact
from gpuserve.front.requests.limits import shown

#: So many documents may wait for a page that reads slowly; then it is let go, and may come again.
MAX_UNSENT: Final = 5
_HTML: Final = b"text/html"
_PAGE: Final = "page.html"
_PRIVATE: Final = AnswerHead(
    200, ((b"content-type", b"application/json"), (b"cache-control", b"no-store"), *GUARDS)
)
_INDEX: Final = AnswerHead(200, (*JSON_OK.headers, (b"vary", b"accept")))
_HEALTH_LINKS: Final = {
    "live": "/v2/health/live",
    "ready": "/v2/health/ready",
    "startup": "/v2/health/startup",
}
#: What there is on each kind of port, for who asks for ``/`` there.
METRICS_INDEX: Final = {
    "message": "gpuserve tells its metrics here",
    "links": {"metrics": "/metrics"} | _HEALTH_LINKS,
}
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


def dashboard_endpoints(live: LivePage | None, policy: Policy) -> dict[Endpoint, Awaiting]:
    """What a server with this live page, or without one, answers; ``policy`` says for whom the page is."""
    root = partial(_root, policy if live is not None else None)
    return {Endpoint.ROOT: root, **({} if live is None else LiveEndpoints(live).awaiting)}


async def _root(policy: Policy | None, _route: Route, request: AwaitedRequest) -> HttpAnswer:
    reason = _OFF if policy is None else _why_no_page(policy, request.exchange)
    if not reason and _wants_html(request.head):
        return HttpAnswer(*files()[_PAGE])
    message = f"gpuserve serves models here; {reason or 'the live page is at / for browsers'}"
    return HttpAnswer(_INDEX, compact({"message": message, "links": _LINKS}).encode())


def _why_no_page(policy: Policy, exchange: Exchange) -> str:
    """Why the page is not for a client, "" where it is; who needs a token gives it on the page."""
    # By which link somebody came to the page does not matter: there is nothing on it yet.
    headers = [one for one in exchange.head.headers if one[0] != SITE]
    local = is_local(address_of(exchange.ends), headers)
    verdict = policy.judge(Endpoint.DASHBOARD_LIVE.access, headers, is_local=local)
    return "" if verdict in {Verdict.ALLOWED, Verdict.NO_TOKEN} else _ELSEWHERE


class LiveEndpoints:
    """The endpoints that tell what the page shows."""

    def __init__(self, live: LivePage) -> None:
        self._live = live
        self.awaiting: dict[Endpoint, Awaiting] = {
            Endpoint.DASHBOARD_FILE: self._file,
            Endpoint.DASHBOARD_LIVE: self._follow,
            Endpoint.DASHBOARD_HISTORY: self._history,
            Endpoint.DASHBOARD_CONFIG: self._config,
        }

    async def _file(self, _route: Route, request: AwaitedRequest) -> HttpAnswer:
        name = request.head.path.rpartition("/")[2]
        if name not in files():
            raise NotFound(f"the live page has no file '{shown(name)}'")
        return HttpAnswer(*files()[name])

    async def _history(self, route: Route, _request: AwaitedRequest) -> HttpAnswer:
        found = self._live.feed.sampler.history_of(route.version)
        if found is None:
            name, version = map(shown, route.version)
            raise NotFound(f"there is no history of model '{name}' version {version}")
        return _private(found)

    async def _config(self, _route: Route, _request: AwaitedRequest) -> HttpAnswer:
        return _private({"settings": self._live.settings.document()})

    async def _follow(self, _route: Route, request: AwaitedRequest) -> None:
        """Send what the feed tells as server-sent events, until the page goes or the feed ends."""
        exchange = request.exchange
        page = OpenPage(exchange)
        self._live.feed.join(page)
        try:
            start_events(exchange)
            while (data := await page.next(request)) is not None:
                exchange.send(data)
                await exchange.room()
            exchange.finish()
        finally:
            self._live.feed.leave(page)


class OpenPage:
    """One page that follows the feed: what it has not been sent."""

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
        self._wake()

    def end(self) -> None:
        self._has_ended = True
        self._wake()

    async def next(self, client: AwaitedRequest) -> bytes | None:
        """What is to be sent, at least one event; None: nothing more comes. Raises ClientGone."""
        while not (self._unsent or self._has_ended):
            self._changed = asyncio.get_running_loop().create_future()
            await client.unless_gone(self._changed)
        data = b"".join(self._unsent)
        self._unsent.clear()
        return data or None

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


def _private(document: Any) -> HttpAnswer:
    return HttpAnswer(_PRIVATE, orjson.dumps(document))


def _wants_html(head: Head) -> bool:
    return any(name == b"accept" and _HTML in value for name, value in head.headers)
