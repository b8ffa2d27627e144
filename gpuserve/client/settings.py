"""The checked arguments of every client, and the headers that show an access token. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.client.exceptions import ClientValueError
from gpuserve.client.url import GRPC, HTTP, ServerUrl

DEFAULT_INIT_TIMEOUT_S: Final = 300.0
DEFAULT_INFERENCE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Which model of which server, and how long to wait for it. ``model_version`` "" is the newest."""

    url: ServerUrl
    model_name: str
    model_version: str
    init_timeout_s: float
    inference_timeout_s: float
    access_token: str | None

    @classmethod
    def checked(
        cls,
        url: str | ServerUrl,
        model_name: str,
        model_version: str | int | None,
        init_timeout_s: float | None,
        inference_timeout_s: float | None,
        access_token: str | None,
    ) -> ClientSettings:
        """The settings that a constructor's arguments mean; None is the default.

        Raises:
            ClientValueError: one of them is wrong; ClientInvalidUrlError where it is the URL.
        """
        if not isinstance(model_name, str) or not model_name:
            raise ClientValueError(f"model_name must be a non-empty string, got {model_name!r}")
        return cls(
            url if isinstance(url, ServerUrl) else ServerUrl.parse(url),
            model_name,
            "" if model_version is None else str(model_version),
            _timeout("init_timeout_s", init_timeout_s, DEFAULT_INIT_TIMEOUT_S),
            _timeout("inference_timeout_s", inference_timeout_s, DEFAULT_INFERENCE_TIMEOUT_S),
            access_token or None,
        )

    @property
    def shown(self) -> str:
        return f"{self.model_name}/{self.model_version or '<latest>'}"

    def headers(self, more: Mapping[str, Any] | None = None) -> dict[str, str] | None:
        """The headers of one call: the token's, and those given; None where there are none."""
        if not more and self.access_token is None:
            return None
        headers = create_auth_headers(self.access_token, self.url.protocol) if self.access_token else {}
        lower = self.url.protocol == GRPC  # metadata keys have no capitals
        for key, value in (more or {}).items():
            headers[key.lower() if lower else key] = str(value)
        return headers


def _timeout(name: str, given: float | None, default: float) -> float:
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise ClientValueError(f"{name} must be a number of seconds above 0, got {given!r}")
    return float(given)


#: protocol -> the header, or metadata key, that a server expects the token in
HEADERS: Final = {HTTP: "triton-access-token", GRPC: "triton-grpc-protocol-triton-access-token"}


def create_auth_headers(access_token: str | None, protocol: str) -> dict[str, str]:
    """The header that shows the token to a server.

    Raises:
        ValueError: there is no token, or the protocol is neither "http" nor "grpc" (in any case).
    """
    if not access_token:
        raise ValueError("access_token cannot be None or empty")
    if protocol.lower() not in HEADERS:
        raise ValueError(f"Invalid protocol {protocol!r}: expected 'http' or 'grpc'")
    return {HEADERS[protocol.lower()]: access_token}


def extract_access_token_from_headers(headers: Mapping[str, str] | None) -> str | None:
    """The token in the headers of either protocol, None where there is none.

    Raises:
        ValueError: both are there and differ.
    """
    lower = {key.lower(): value for key, value in (headers or {}).items()}
    found = {lower[name] for name in HEADERS.values() if name in lower}
    if len(found) > 1:
        raise ValueError("Conflicting authentication headers found: the two access tokens differ")
    return found.pop() if found else None
