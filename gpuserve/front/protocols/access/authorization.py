"""Authorization: who a client is, endpoints that it may use (``endpoints.py``), and its rate. Pure."""

from __future__ import annotations

import enum
import ipaddress
import socket
import struct
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from gpuserve.config.settings.values import DASHBOARD, TOKEN_HEADER, AccessRule
from gpuserve.core.errors import PermissionDenied, RateLimited, RequestError, Unavailable
from gpuserve.front.net.exchange import ConnectionEndpoints, Exchange, Head, Header
from gpuserve.front.net.request_rate_limiter import RequestRates
from gpuserve.front.protocols.access.endpoints import (
    METHODS,
    Access,
    AccessKind,
    Endpoint,
    Route,
    RouteError,
    match_route,
)
from gpuserve.front.requests.limits import shown

#: The address of a client on a unix socket, which has none.
UNIX: Final = "unix:"
#: An unknown address.
UNKNOWN: Final = ""
#: Headers that proxies add.
_FORWARDED: Final = frozenset(
    {
        b"cf-connecting-ip", b"cf-ray", b"forwarded", b"true-client-ip", b"via", b"x-client-ip",
        b"x-cluster-client-ip", b"x-real-ip",
    }
)  # fmt: skip
_FORWARDED_STARTS: Final = (b"x-forwarded-", b"x-envoy-", b"x-original-")
_ORIGIN: Final = b"origin"
#: The header by which browsers say which site a request comes from.
SITE: Final = b"sec-fetch-site"
_OTHER_SITE: Final = b"cross-site"
#: Values of ``SITE`` for pages of the server itself and for addresses that a user typed.
_OWN_SITE: Final = frozenset({b"same-origin", b"none"})
_LOCAL_NAME: Final = "localhost"


def is_local_client(address: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a request comes from a client on this machine. Header names are in lower case."""
    return is_on_this_machine(address) and not any(
        name in _FORWARDED
        or name.startswith(_FORWARDED_STARTS)
        or (name == _ORIGIN and not _is_local_origin(value))
        or (name == SITE and value == _OTHER_SITE)
        for name, value in headers
    )


def is_cross_origin(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a browser sends a request for a page of another origin: host, or port of this one."""
    host, origins = b"", []
    for name, value in headers:
        if name == b"host":
            host = value.lower()
        elif name == _ORIGIN:
            origins.append(value.lower())
        elif name == SITE and value not in _OWN_SITE:
            return True
    return any(one.partition(b"://")[2] != host for one in origins)


def is_on_this_machine(address: str) -> bool:
    """Return whether the peer of a connection is on this machine, possibly as a proxy for others."""
    return address == UNIX or _is_loopback(address)


def address_of(endpoints: ConnectionEndpoints) -> str:
    if endpoints.server[1] is None:
        return UNIX
    return endpoints.client[0] if endpoints.client else UNKNOWN


def grpc_address(peer: str) -> str:
    """Return the address in grpc's name of a peer: ``ipv4:127.0.0.1:5``, ``ipv6:%5B::1%5D:5``, ``unix:…``."""
    kind, _, rest = peer.partition(":")
    if kind in {"unix", "unix-abstract"}:
        return UNIX
    if kind not in {"ipv4", "ipv6"}:
        return UNKNOWN
    return urllib.parse.unquote(rest).rpartition(":")[0].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _is_local_origin(value: bytes) -> bool:
    try:
        host = urllib.parse.urlsplit(value.decode("latin-1")).hostname or ""
    except ValueError:
        return False
    return host == _LOCAL_NAME or _is_loopback(host)


#: In ``allowed_hosts``: any name.
_ANY_HOST: Final = "*"
#: Headers that browsers send and few other clients do. A page cannot leave out all of these.
_BROWSERS: Final = frozenset({b"accept-language", b"cookie", b"origin", b"referer", b"sec-fetch-mode"})
_BROWSERS_AGENT: Final = b"Mozilla/"
#: Suffixes of names that nobody can register.
_RESERVED: Final = ("localhost", "local", "internal", "test", "home.arpa")


class ForeignHost(NamedTuple):
    """A host name in a browser's request that is not trusted without ``allowed_hosts``."""

    name: str


def foreign_host(headers: Iterable[Header]) -> ForeignHost | None:
    """Return the host that a browser's request names if anybody could have registered it, else None."""
    host, from_browser = "", False
    for name, value in headers:
        if name == b"host":
            host, colon, port = value.decode("latin-1").lower().rpartition(":")
            host = (host if colon and port.isdigit() else host + colon + port).rstrip(".")
        elif name in _BROWSERS or (name == b"user-agent" and value.startswith(_BROWSERS_AGENT)):
            from_browser = True
    return ForeignHost(host) if from_browser and not _is_unregistrable(host) else None


class AllowedHosts:
    """The check of host names. Without allowed names, only requests from this machine are checked."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._machine = socket.gethostname().lower()

    def refusal(self, host: ForeignHost, address: str) -> RouteError | None:
        """Return the error for a request that names a foreign host, or None if the host is allowed."""
        if not (self._names or is_on_this_machine(address)) or {_ANY_HOST, host.name} & self._names:
            return None
        if host.name == self._machine:
            return None
        return RouteError(
            421,
            f"pages in browsers may not ask this server as '{shown(host.name)}', expected an address, "
            "localhost, or a name in the setting allowed_hosts",
        )


def _is_unregistrable(name: str) -> bool:
    """Return whether no stranger can register a name: an address, one without a dot, or a reserved one."""
    if "." not in name or name.endswith(tuple(f".{end}" for end in _RESERVED)):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


#: SO_PEERCRED: process, user and group of the peer.
_CREDENTIALS: Final = struct.Struct("iII")
_INET_DIAG: Final = 4
_BY_FAMILY: Final = 20
_REQUEST: Final = 1
#: A netlink header: size, type, flags, sequence number, port.
_HEAD: Final = struct.Struct("=IHHII")
#: An inet_diag request: family, protocol, extensions, states; then ports, addresses, interface and cookie.
_QUESTION: Final = struct.Struct("=BBBxI")
_ADDRESSES: Final = struct.Struct("!HH16s16sIII")
_ANY: Final = (1 << 32) - 1
_ALL_UIDS: Final = _ANY
#: An inet_diag answer: family and state, and further on the uid and the inode.
_STATE: Final = struct.Struct("=BB")
_USER: Final = struct.Struct("=II")
_USER_AT: Final = 4 + _ADDRESSES.size + 12
_ESTABLISHED: Final = 1
#: The result of this request depends on the client's user.
_REGISTER: Final = Endpoint.SYSTEM_REGION_REGISTER


def depends_on_user(head: Head) -> bool:
    """Return whether the handler of a request with this head asks for the client's user."""
    if head.is_grpc:
        return head.path.endswith(f"/{_REGISTER.rpc}")
    return head.method == _REGISTER.method and _REGISTER.pattern.fullmatch(head.raw_path) is not None


def client_uid(exchange: Exchange) -> int | None:
    """Return the uid of a request's client, or None if the client is on another machine or unknown."""
    endpoints, sock = exchange.endpoints, exchange.endpoints.socket
    if not is_local_client(address_of(endpoints), exchange.head.headers):
        return None
    if sock is None:
        return endpoints.user
    try:
        if endpoints.client is None:
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return _trusted_uid(_CREDENTIALS.unpack(raw)[1])
        user = _loopback_uid(endpoints)
        # If the client has gone, somebody else may have the address now.
        stays = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
        return _trusted_uid(user) if stays and user is not None else None
    except OSError:
        return None


def _loopback_uid(endpoints: ConnectionEndpoints) -> int | None:
    """Return the uid of a loopback client, or None if it is gone. Raise OSError if sock_diag fails."""
    assert endpoints.client is not None
    client, server = (ipaddress.ip_address(end[0]) for end in (endpoints.client, endpoints.server))
    family = socket.AF_INET if client.version == 4 else socket.AF_INET6
    ports = endpoints.client[1], endpoints.server[1] or 0
    request = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, _ANY)
    request += _ADDRESSES.pack(*ports, client.packed, server.packed, 0, _ANY, _ANY)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _INET_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(_HEAD.pack(_HEAD.size + len(request), _BY_FAMILY, _REQUEST, 0, 0) + request)
        answer = kernel.recv(4096)
    if len(answer) < _HEAD.size + _USER_AT + _USER.size or _HEAD.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    _, state = _STATE.unpack_from(answer, _HEAD.size)
    user, inode = _USER.unpack_from(answer, _HEAD.size + _USER_AT)
    return user if state == _ESTABLISHED and inode else None  # a closed socket has no owner


def _trusted_uid(user: int) -> int | None:
    """Return the uid, or None if it is the number for users that the user namespace does not map."""
    if user != int(Path("/proc/sys/kernel/overflowuid").read_text()):
        return user
    spans = Path("/proc/self/uid_map").read_text().splitlines()
    return user if sum(int(span.split()[2]) for span in spans) == _ALL_UIDS else None


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
