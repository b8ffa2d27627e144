"""``TritonSecurityConfig``: which endpoints need a token. PyTriton's defaults, gpuserve's settings."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from gpuserve.client.settings import HEADERS
from gpuserve.client.url import HTTP
from gpuserve.compat.pytriton.exceptions import PyTritonValidationError
from gpuserve.compat.pytriton.translation import pytriton_errors
from gpuserve.config.settings.checks import checked_settings
from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.settings.values import ADMIN, DASHBOARD, ENDPOINT_GROUPS

VALID_TRITON_ENDPOINTS: Final = set(ENDPOINT_GROUPS) - {ADMIN, DASHBOARD}
DEFAULT_PROTECTED_ENDPOINTS: Final = ("shared-memory", "model-repository", "statistics", "trace", "logging")
TRITON_ACCESS_HEADER: Final = HEADERS[HTTP]
_TOKEN_NBYTES: Final = 32


@dataclass
class TritonSecurityConfig:
    """Endpoints that need ``access_token``. By default those that change or watch the server, and a random
    token; an empty list restricts none.

    Raises:
        PyTritonValidationError: a name is no group of endpoints, or no header can carry the token.
    """

    access_token: str | None = None
    restricted_endpoints: list[str] | None = None

    def __post_init__(self) -> None:
        if self.restricted_endpoints is None:
            self.restricted_endpoints = list(DEFAULT_PROTECTED_ENDPOINTS)
        if self.access_token is None and self.restricted_endpoints:
            self.access_token = secrets.token_urlsafe(_TOKEN_NBYTES)
        if unknown := [one for one in self.restricted_endpoints if one not in ENDPOINT_GROUPS]:
            valid = ", ".join(sorted(VALID_TRITON_ENDPOINTS))
            given = ", ".join(map(str, unknown))
            raise PyTritonValidationError(f"Invalid endpoint names: {given}. Valid endpoints are: {valid}")
        with pytriton_errors():
            restricted = tuple(self.restricted_endpoints)
            checked_settings(ServerSettings(restricted_endpoints=restricted, access_token=self.access_token))
