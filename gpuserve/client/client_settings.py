"""The checked arguments of a client: model, time-outs, access token, and the server's URL."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gpuserve.client.exceptions import ClientInvalidUrlError, ClientValueError

GRPC: Final = "grpc"
HTTP: Final = "http"
DEFAULT_HTTP_PORT: Final = 8000
DEFAULT_GRPC_PORT: Final = 8001
#: Protocol, TLS and default port of each scheme.
_SCHEMES: Final = {
    "http": (HTTP, False, DEFAULT_HTTP_PORT),
    "https": (HTTP, True, 443),
    "grpc": (GRPC, False, DEFAULT_GRPC_PORT),
    "grpcs": (GRPC, True, 443),
}
#: The header, or metadata key, of the access token, by protocol.
HEADERS: Final = {HTTP: "triton-access-token", GRPC: "triton-grpc-protocol-triton-access-token"}
DEFAULT_INIT_TIMEOUT_S: Final = 300.0
DEFAULT_INFERENCE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The model, its server, and the time limits. A ``model_version`` of "" is the newest version."""

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
        """Check a constructor's arguments, of which None is the default; raise ClientValueError."""
        if not isinstance(model_name, str) or not model_name:
            raise ClientValueError(f"model_name must be a non-empty string, got {model_name!r}")
        return cls(
            url if isinstance(url, ServerUrl) else ServerUrl.parse(url),
            model_name,
            "" if model_version is None else str(model_version),
            _checked_timeout("init_timeout_s", init_timeout_s, DEFAULT_INIT_TIMEOUT_S),
            _checked_timeout("inference_timeout_s", inference_timeout_s, DEFAULT_INFERENCE_TIMEOUT_S),
            access_token or None,
        )

    @property
    def shown(self) -> str:
        return f"{self.model_name}/{self.model_version or '<latest>'}"

    def headers(self, more: Mapping[str, Any] | None = None) -> dict[str, str] | None:
        """Return the headers of a call: the token's and those given, or None if there are none."""
        if not more and self.access_token is None:
            return None
        headers = create_auth_headers(self.access_token, self.url.protocol) if self.access_token else {}
        lower = self.url.protocol == GRPC  # metadata keys have no capitals
        for key, value in (more or {}).items():
            headers[key.lower() if lower else key] = str(value)
        return headers


def _checked_timeout(name: str, given: float | None, default: float) -> float:
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise ClientValueError(f"{name} must be a number of seconds above 0, got {given!r}")
    return float(given)


def create_auth_headers(access_token: str | None, protocol: str) -> dict[str, str]:
    """Return the header with the access token; raise ValueError without a token or protocol."""
    if not access_token:
        raise ValueError("access_token cannot be None or empty")
    if protocol.lower() not in HEADERS:
        raise ValueError(f"Invalid protocol {protocol!r}: expected 'http' or 'grpc'")
    return {HEADERS[protocol.lower()]: access_token}


def extract_access_token_from_headers(headers: Mapping[str, str] | None) -> str | None:
    """Return the access token in the headers, or None; raise ValueError if two headers differ."""
    lower = {key.lower(): value for key, value in (headers or {}).items()}
    found = {lower[name] for name in HEADERS.values() if name in lower}
    if len(found) > 1:
        raise ValueError("Conflicting authentication headers found: the two access tokens differ")
    return found.pop() if found else None


class ServerUrl(NamedTuple):
    """The address of a server. ``protocol`` is "grpc" or "http"; ``tls`` is encryption."""

    protocol: str
    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, url: object) -> ServerUrl:
        """Parse ``[http|https|grpc|grpcs://]host[:port]``, HTTP by default; raise ClientInvalidUrlError."""
        if not isinstance(url, str):
            raise _invalid_url(url, f"expected a string, got {type(url).__name__}")
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in _SCHEMES:
            raise _invalid_url(url, f"the scheme is one of {', '.join(_SCHEMES)}, got {parts.scheme!r}")
        protocol, tls, default_port = _SCHEMES[parts.scheme]
        try:
            port = default_port if parts.port is None else parts.port
        except ValueError:
            raise _invalid_url(url, "the port is a number from 0 to 65535") from None
        if not parts.hostname or parts.username is not None or any(map(str.isspace, parts.netloc)):
            raise _invalid_url(url, "expected host or host:port")
        return cls(protocol, parts.hostname, port, tls)

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.protocol}{'s' if self.tls else ''}://{self.address}"


def _invalid_url(url: object, why: str) -> ClientInvalidUrlError:
    return ClientInvalidUrlError(f"Invalid url {url!r:.200}: {why}")
