"""Who may ask for which endpoint: the judgement by the table in ``endpoints.py``. Pure. Where the headers and
the address are taken from a request, and how a refusal is sent, is each door's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, TypeAlias

from gpuserve.config.settings.values import DASHBOARD, TOKEN_HEADER, AccessRule
from gpuserve.core.errors import PermissionDenied, RequestError, Unavailable
from gpuserve.front.doors.access.endpoints import Access, Kind
from gpuserve.front.doors.access.peers import is_of_another_page

#: Before the name of a token's header over gRPC. The name alone is taken as well.
GRPC_PREFIX: Final = "triton-grpc-protocol-"
_AUTHORIZATION: Final = b"authorization"
_BEARER: Final = b"bearer "
_CHANGING: Final = frozenset({Kind.CONTROL, Kind.EITHER})
_FOR_ALL: Final = frozenset({Kind.USE, Kind.BARE})

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]


class Verdict(enum.Enum):
    ALLOWED = "served"
    READ_ONLY = "served as long as it changes nothing"
    NO_TOKEN = "refused: its group needs a token"
    REMOTE = "refused: it is for clients on this machine"


class Policy:
    """The judgement of one server. ``remote_control`` are groups that need no local client."""

    def __init__(self, rules: Iterable[AccessRule] = (), remote_control: Iterable[str] = ()) -> None:
        self._rules: dict[str, list[AccessRule]] = {}
        for rule in rules:
            for group in rule.groups:
                self._rules.setdefault(group, []).append(rule)
        self._remote_control = frozenset(remote_control)

    def is_open(self, access: Access) -> bool:
        """Whether anybody may ask for it, so that nobody has to look at who does."""
        if access.kind is Kind.BARE:
            return True
        return not self._needed(access) and self._is_for_all(access)

    def judge(self, access: Access, headers: Headers, *, is_local: bool, prefix: str = "") -> Verdict:
        """What becomes of a request.

        Args:
            access: what the table says of its endpoint.
            headers: the request's, names in lower case.
            is_local: whether its client is on this machine.
            prefix: what the names of the headers of tokens may have before them.
        """
        has_own = access.group in self._rules
        if is_local and access.kind in _CHANGING and is_of_another_page(headers):
            is_local = False  # any page that a user of this machine looks at can send requests
        if not (has_own or is_local or self._is_for_all(access)):
            return Verdict.READ_ONLY if access.kind is Kind.EITHER else Verdict.REMOTE
        if all(shows_token(self._rules[one], headers, prefix) for one in self._needed(access)):
            return Verdict.ALLOWED
        return Verdict.NO_TOKEN

    def _is_for_all(self, access: Access) -> bool:
        """Whether it would be for anybody if there were no rules."""
        return access.kind in _FOR_ALL or access.group in self._remote_control

    def _needed(self, access: Access) -> tuple[str, ...]:
        """The groups whose tokens have to be shown."""
        if access.kind is Kind.BARE:
            return ()
        if access.group in self._rules:
            return (access.group,)
        return tuple(one for one in access.shows if one in self._rules)

    def refusal(self, access: Access, verdict: Verdict, prefix: str = "") -> RequestError:
        """What a client is told that is refused; the texts of a missing token are Triton's."""
        if verdict is not Verdict.NO_TOKEN:
            return PermissionDenied(
                f"This '{access.group}' operation is only for clients on the server's own machine, without "
                "a proxy between, and not for pages of another server; "
                f"{_opened_by(access.group)}, or a token for the group, opens it to others"
            )
        what = "protocol" if prefix else "API"
        header = prefix + self._rules[self._needed(access)[0]][0].header.lower()
        return Unavailable(f"This {what} is restricted, expecting header '{header}'")


def _opened_by(group: str) -> str:
    return "dashboard: on" if group == DASHBOARD else "the setting remote_control"


def token_headers(rules: Iterable[AccessRule]) -> frozenset[str]:
    """The names, in lower case, of all headers that may carry a token: they are for the server alone."""
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
