"""Who may ask for what, as the settings say it: the groups of endpoints that can be restricted, the token,
and the pattern of the headers that reach a model. Pure; the doors apply it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gpuserve.errors import ConfigError
from gpuserve.settings import ServerSettings

#: What ``restricted_endpoints`` may name; the words are Triton's.
ENDPOINT_GROUPS: Final = (
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
NO_TOKEN: Final = "restricted_endpoints need an access_token: without one nobody could use them"
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


def check_access(settings: ServerSettings) -> None:
    """Do nothing where what the settings say of access holds together. The token is in no text.

    Raises:
        ConfigError: a group that there is not, a token that no header can carry, endpoints that nobody
            could use, or a pattern that is none.
    """
    _check_groups(settings.restricted_endpoints)
    problem = token_problem(settings.access_token)
    if problem is not None:
        raise ConfigError(f"access_token: {problem}")
    if settings.restricted_endpoints and settings.access_token is None:
        raise ConfigError(NO_TOKEN)
    for name in ("http_header_forward_pattern", "grpc_header_forward_pattern"):
        try:
            header_pattern(getattr(settings, name))
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None


def token_problem(token: object) -> str | None:
    """What a token should be and is not; None where it is all right."""
    if token is None:
        return None
    if not isinstance(token, str) or not token:
        return "expected a string that is not empty"
    if not token.isascii() or not token.isprintable() or token != token.strip():
        return "expected printable ASCII without spaces at its ends, because a header carries it"
    return None


def _check_groups(groups: Sequence[str]) -> None:
    if isinstance(groups, str) or any(one not in ENDPOINT_GROUPS for one in groups):
        known = ", ".join(ENDPOINT_GROUPS)
        raise ConfigError(f"restricted_endpoints: expected a list of any of {known}, given {groups!r}")
