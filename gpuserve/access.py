"""Who may ask for what, as the settings say it: the groups of endpoints that can be restricted, the tokens,
and the pattern of the headers that reach a model. Pure; the doors apply it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from gpuserve.errors import ConfigError
from gpuserve.settings import AccessRule, ServerSettings

#: The group of the admin API.
ADMIN: Final = "admin"
#: What ``restricted_endpoints`` and the rules may name; the other words are Triton's.
ENDPOINT_GROUPS: Final = (
    ADMIN,
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
#: on its machine may ask for.
CONTROL_GROUPS: Final = (ADMIN, "logging", "model-repository", "shared-memory", "trace")
NO_TOKEN: Final = "restricted_endpoints need an access_token: without one nobody could use them"
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


def all_rules(settings: ServerSettings) -> tuple[AccessRule, ...]:
    """The rules, those that ``restricted_endpoints`` and ``access_token`` stand for first."""
    token = settings.access_token
    if not settings.restricted_endpoints or token is None:
        return tuple(settings.access_rules)
    return (AccessRule(tuple(settings.restricted_endpoints), token), *settings.access_rules)


def check_access(settings: ServerSettings) -> None:
    """Do nothing where what the settings say of access holds together. No token is in any text.

    Raises:
        ConfigError: a group that there is not, a token or header that cannot be, endpoints that nobody
            could use, or a pattern that is none.
    """
    check_words("restricted_endpoints", settings.restricted_endpoints, ENDPOINT_GROUPS)
    check_words("remote_control", settings.remote_control, CONTROL_GROUPS)
    problem = None if settings.access_token is None else token_problem(settings.access_token)
    if problem is not None:
        raise ConfigError(f"access_token: {problem}")
    if settings.restricted_endpoints and settings.access_token is None:
        raise ConfigError(NO_TOKEN)
    _check_rules(settings.access_rules)
    for name in ("http_header_forward_pattern", "grpc_header_forward_pattern"):
        try:
            header_pattern(getattr(settings, name))
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None


def token_problem(token: object) -> str | None:
    """What a token should be and is not; None where it is all right."""
    if not isinstance(token, str) or not token:
        return "expected a string that is not empty"
    if not token.isascii() or not token.isprintable() or token != token.strip():
        return "expected printable ASCII without spaces at its ends, because a header carries it"
    return None


def header_problem(header: object) -> str | None:
    """What the name of a token's header should be and is not; None where it is all right."""
    if not isinstance(header, str) or _HEADER_NAME.fullmatch(header) is None:
        return f"expected a header's name of letters, digits, '.', '_' and '-', given {header!r}"
    if header.lower() == "authorization" or header.lower().endswith("-bin"):
        return f"{header!r} cannot be it: Authorization always carries 'Bearer' tokens, '-bin' is gRPC's own"
    return None


def _check_rules(rules: Iterable[AccessRule]) -> None:
    for position, rule in enumerate(rules):
        where = f"access_rules[{position}]"
        if not isinstance(rule, AccessRule):
            raise ConfigError(f"{where}: expected an AccessRule, given a value of type {type(rule).__name__}")
        if not rule.groups:
            raise ConfigError(f"{where}.groups: expected at least one of {', '.join(ENDPOINT_GROUPS)}")
        check_words(f"{where}.groups", rule.groups, ENDPOINT_GROUPS)
        for key, problem in (("token", token_problem(rule.token)), ("header", header_problem(rule.header))):
            if problem is not None:
                raise ConfigError(f"{where}.{key}: {problem}")


def check_words(name: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Do nothing where a setting is a list of known words.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(given, str) or any(one not in known for one in given):
        raise ConfigError(f"{name}: expected a list of any of {', '.join(known)}, given {given!r}")
