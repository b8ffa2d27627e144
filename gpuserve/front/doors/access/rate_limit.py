"""Which client pays for a request under the rate limit, by the request's head alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpuserve.config.settings.values import AccessRule
from gpuserve.core.errors import RateLimited
from gpuserve.front.doors.access import routes
from gpuserve.front.doors.access.endpoints import METHODS, Endpoint
from gpuserve.front.doors.access.restrictions import GRPC_PREFIX, shows_token
from gpuserve.front.doors.access.routes import Route
from gpuserve.front.exchange.exchange import Exchange, Head
from gpuserve.front.exchange.request_rates import RequestRates

#: Values of ``Head.payer`` besides the index of a token.
_NOBODY: Final = -1
_ADDRESS: Final = -2
_HEALTH: Final = "health"


class RateLimit:
    """The rate limiter for the requests of one server. ``rates`` says whether it is on.

    A request with a token of ``rules`` is counted under the token, whatever address it comes from; every
    other request, also one with a wrong token, under its address. Health and ``/metrics`` are exempt, and so
    is a request without a token over a connection without an address (a unix socket).
    """

    def __init__(self, rates: RequestRates, rules: Iterable[AccessRule] = ()) -> None:
        self.rates = rates
        by_token: dict[str, list[AccessRule]] = {}
        for rule in rules:
            by_token.setdefault(rule.token, []).append(rule)
        self._rules_of_tokens = tuple(by_token.values())

    def refusal(self, exchange: Exchange) -> RateLimited | None:
        """Count a request. Returns the error to answer it with if its client is over the limit."""
        head = exchange.head
        payer = head.payer
        if payer is None:
            payer = head.payer = self._payer(head)
        if payer == _NOBODY:
            return None
        client = exchange.ends.source if payer == _ADDRESS else payer
        return None if client == "" else self.rates.refusal(client)

    def _payer(self, head: Head) -> int:
        if _is_exempt(head):
            return _NOBODY
        prefix = GRPC_PREFIX if head.is_grpc else ""
        for index, rules in enumerate(self._rules_of_tokens):
            if shows_token(rules, head.headers, prefix):
                return index
        return _ADDRESS


def _is_exempt(head: Head) -> bool:
    if head.is_grpc:
        access = METHODS.get(head.path)
        return access is not None and access.group == _HEALTH
    route = routes.match(head.method, head.raw_path)
    return isinstance(route, Route) and (
        route.endpoint is Endpoint.METRICS or route.endpoint.access.group == _HEALTH
    )
