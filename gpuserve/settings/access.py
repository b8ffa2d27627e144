"""Who may ask for what, as the settings say it: the groups of endpoints that can be restricted, the tokens
that open them, and the pattern of the headers that reach a model. Pure; the doors apply it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.options import option, required

#: The group of the admin API.
ADMIN: Final = "admin"
#: The group of the live page and of what it shows.
DASHBOARD: Final = "dashboard"
#: What ``restricted_endpoints`` and the rules may name; the other words are Triton's.
ENDPOINT_GROUPS: Final = (
    ADMIN,
    DASHBOARD,
    "health",
    "inference",
    "logging",
    "metadata",
    "model-config",
    "model-repository",
    "shared-memory",
    "statistics",
    "trace",
)
#: The groups with operations that change the server, or show what is for its operators, which only clients
#: on its machine may ask for. So it is with the live page, which has a setting of its own for it.
CONTROL_GROUPS: Final = (ADMIN, "logging", "model-repository", "shared-memory", "trace")
NO_TOKEN: Final = "restricted_endpoints need an access_token: without one nobody could use them"
#: The header that carries an access token unless a rule names another.
TOKEN_HEADER: Final = "triton-access-token"
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CASE_COUNTS: Final = "(?-i)"


def header_pattern(text: str) -> re.Pattern[str]:
    """The pattern of a ``…_header_forward_pattern``, to be searched in header names in lower case.

    Case does not count unless it begins with ``(?-i)``, which Python would not take there.

    Raises:
        ValueError: it is no regular expression.
    """
    try:
        if text.startswith(_CASE_COUNTS):
            return re.compile(text.removeprefix(_CASE_COUNTS))
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"expected a regular expression, given {text!r}: {error}") from None


def read_pattern(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"expected a regular expression, given {text!r:.200}")
    header_pattern(text)
    return text


def read_token(token: Any) -> str:
    """A token, which no message shows. Raises ValueError: no header can carry it."""
    if not isinstance(token, str) or not token:
        raise ValueError("expected a string that is not empty")
    if not token.isascii() or not token.isprintable() or token != token.strip():
        raise ValueError("expected printable ASCII without spaces at its ends, because a header carries it")
    return token


def read_header(header: Any) -> str:
    if not isinstance(header, str) or _HEADER_NAME.fullmatch(header) is None:
        raise ValueError(f"expected a header's name of letters, digits, '.', '_' and '-', given {header!r}")
    if header.lower() == "authorization" or header.lower().endswith("-bin"):
        raise ValueError(
            f"{header!r} cannot be it: Authorization always carries 'Bearer' tokens, '-bin' is gRPC's own"
        )
    return header


@dataclass(frozen=True, slots=True)
class AccessRule:
    """A token that opens groups of endpoints, which are closed without one.

    Clients show it as ``Authorization: Bearer …``, or as the value of ``header``, which over gRPC has
    "triton-grpc-protocol-" before it.
    """

    groups: tuple[str, ...] = required(
        "Groups of endpoints, which are closed without a token.", words=ENDPOINT_GROUPS, some=True
    )
    token: str = required("The token.", read=read_token, secret=True)
    header: str = option(
        TOKEN_HEADER, "The header that carries it where Authorization does not.", read=read_header
    )
