"""The address of a server: a URL as users write it, to protocol, host and port. Pure."""

from __future__ import annotations

import urllib.parse
from typing import Final, NamedTuple

from gpuserve.client.exceptions import ClientInvalidUrlError

GRPC: Final = "grpc"
HTTP: Final = "http"
DEFAULT_HTTP_PORT: Final = 8000
DEFAULT_GRPC_PORT: Final = 8001
#: scheme -> (protocol, TLS, default port)
_SCHEMES: Final = {
    "http": (HTTP, False, DEFAULT_HTTP_PORT),
    "https": (HTTP, True, 443),
    "grpc": (GRPC, False, DEFAULT_GRPC_PORT),
    "grpcs": (GRPC, True, 443),
}


class ServerUrl(NamedTuple):
    """Where a server is: ``protocol`` is "grpc" or "http"; ``tls`` whether the connection is encrypted."""

    protocol: str
    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, url: object) -> ServerUrl:
        """The server of a URL: ``[http|https|grpc|grpcs://]host[:port]``, HTTP without a scheme. A path
        does not count.

        Raises:
            ClientInvalidUrlError: it is no such URL.
        """
        if not isinstance(url, str):
            raise _invalid(url, f"expected a string, got {type(url).__name__}")
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in _SCHEMES:
            raise _invalid(url, f"the scheme is one of {', '.join(_SCHEMES)}, got {parts.scheme!r}")
        protocol, tls, default_port = _SCHEMES[parts.scheme]
        try:
            port = default_port if parts.port is None else parts.port
        except ValueError:
            raise _invalid(url, "the port is a number from 0 to 65535") from None
        if not parts.hostname or parts.username is not None or any(map(str.isspace, parts.netloc)):
            raise _invalid(url, "expected host or host:port")
        return cls(protocol, parts.hostname, port, tls)

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.protocol}{'s' if self.tls else ''}://{self.address}"


def _invalid(url: object, why: str) -> ClientInvalidUrlError:
    return ClientInvalidUrlError(f"Invalid url {url!r:.200}: {why}")
