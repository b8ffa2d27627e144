"""Authorization: endpoints that a client may use (``endpoints.py``), and rate-limited clients. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, TypeAlias

from gpuserve.config.settings.values import DASHBOARD, TOKEN_HEADER, AccessRule
from gpuserve.core.errors import PermissionDenied, RateLimited, RequestError, Unavailable
from gpuserve.front.net.exchange import Exchange, Head
from gpuserve.front.net.request_rate_limiter import RequestRates
from gpuserve.front.protocols.access.clients import is_cross_origin
from gpuserve.front.protocols.access.endpoints import (
    METHODS,
    Access,
    AccessKind,
    Endpoint,
    Route,
    match_route,
)

#: The prefix of a token's header over gRPC. The name without the prefix is accepted too.
GRPC_PREFIX: Final = "triton-grpc-protocol-"
_AUTHORIZATION: Final = b"authorization"
_BEARER: Final = b"bearer "
_CHANGING: Final = frozenset({AccessKind.CONTROL, AccessKind.EITHER})
_FOR_ALL: Final = frozenset({AccessKind.USE, AccessKind.BARE})

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]


class Verdict(enum.Enum):
    """The decision about one request."""

    ALLOWED = "allowed"
    READ_ONLY = "allowed if the request changes nothing"
    NO_TOKEN = "refused: the group needs a token"
    REMOTE = "refused: only for clients on this machine"


class AccessPolicy:
    """The access rules of one server. ``remote_control`` are groups that remote clients may control."""

    def __init__(self, rules: Iterable[AccessRule] = (), remote_control: Iterable[str] = ()) -> None:
        self._rules: dict[str, list[AccessRule]] = {}
        for rule in rules:
            for group in rule.groups:
                self._rules.setdefault(group, []).append(rule)
        self._remote_control = frozenset(remote_control)

    def is_public(self, access: Access) -> bool:
        """Return whether anybody may use an endpoint, so that no request needs a check."""
        if access.kind is AccessKind.BARE:
            return True
        return not self._required_groups(access) and self._is_public(access)

    def judge(self, access: Access, headers: Headers, *, is_local: bool, prefix: str = "") -> Verdict:
        """Return the decision about a request's ``headers``, with token names after ``prefix``."""
        has_own = access.group in self._rules
        if is_local and access.kind in _CHANGING and is_cross_origin(headers):
            is_local = False  # any web page that a local user opens can send requests
        if not (has_own or is_local or self._is_public(access)):
            return Verdict.READ_ONLY if access.kind is AccessKind.EITHER else Verdict.REMOTE
        if all(shows_token(self._rules[one], headers, prefix) for one in self._required_groups(access)):
            return Verdict.ALLOWED
        return Verdict.NO_TOKEN

    def _is_public(self, access: Access) -> bool:
        """Return whether the endpoint would be for anybody without token rules."""
        return access.kind in _FOR_ALL or access.group in self._remote_control

    def _required_groups(self, access: Access) -> tuple[str, ...]:
        if access.kind is AccessKind.BARE:
            return ()
        if access.group in self._rules:
            return (access.group,)
        return tuple(one for one in access.shows if one in self._rules)

    def refusal(self, access: Access, verdict: Verdict, prefix: str = "") -> RequestError:
        """Return the error for a refused request. The texts for a missing token are Triton's."""
        if verdict is not Verdict.NO_TOKEN:
            unlock = "dashboard: on" if access.group == DASHBOARD else "the setting remote_control"
            return PermissionDenied(
                f"This '{access.group}' operation is only for clients on the server's own machine, without "
                "a proxy between, and not for pages of another server; "
                f"{unlock}, or a token for the group, opens it to others"
            )
        what = "protocol" if prefix else "API"
        header = prefix + self._rules[self._required_groups(access)[0]][0].header.lower()
        return Unavailable(
            f"This {what} is restricted, expecting header '{header}', "
            "or 'authorization: Bearer' with the token"
        )


def token_headers(rules: Iterable[AccessRule]) -> frozenset[str]:
    """Return the lower-case names of all headers that may carry a token: they are for the server alone."""
    rules = tuple(rules)
    names = {TOKEN_HEADER} | {rule.header.lower() for rule in rules}
    bearer = {"authorization"} if rules else set()
    return frozenset(names | {GRPC_PREFIX + name for name in names} | bearer)


def shows_token(rules: Iterable[AccessRule], headers: Headers, prefix: str) -> bool:
    """Return whether the headers carry the token of one of the rules, compared in constant time."""
    import hmac  # OpenSSL takes milliseconds to load, and most servers have no tokens

    given = tuple(headers)
    for rule in rules:
        token, name = rule.token.encode(), rule.header.lower()
        names = {name.encode(), (prefix + name).encode()}
        for key, value in given:
            if key == _AUTHORIZATION and value[: len(_BEARER)].lower() == _BEARER:
                shown = value[len(_BEARER) :].strip()
            elif key in names:
                shown = value
            else:
                continue
            if hmac.compare_digest(shown, token):
                return True
    return False


# ---- rate limit ----------------------------------------------------------------------------------

#: Values of ``Head.payer`` besides the index of a token.
_EXEMPT: Final = -1
_ADDRESS: Final = -2
_HEALTH: Final = "health"


class RateLimit:
    """The rate limit for the requests of one server. ``rates`` has the buckets.

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
        """Count a request. Return the error for the response if the client is over the limit."""
        head = exchange.head
        payer = head.payer
        if payer is None:
            payer = head.payer = self._client_key(head)
        if payer == _EXEMPT:
            return None
        client = exchange.endpoints.source if payer == _ADDRESS else payer
        return None if client == "" else self.rates.refusal(client)

    def _client_key(self, head: Head) -> int:
        if _is_exempt(head):
            return _EXEMPT
        prefix = GRPC_PREFIX if head.is_grpc else ""
        for index, rules in enumerate(self._rules_of_tokens):
            if shows_token(rules, head.headers, prefix):
                return index
        return _ADDRESS


def _is_exempt(head: Head) -> bool:
    if head.is_grpc:
        access = METHODS.get(head.path)
        return access is not None and access.group == _HEALTH
    route = match_route(head.method, head.raw_path)
    return isinstance(route, Route) and (
        route.endpoint is Endpoint.METRICS or route.endpoint.access.group == _HEALTH
    )
