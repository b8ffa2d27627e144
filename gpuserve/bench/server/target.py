"""Where the requests go: the server, the model, and what every call carries. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpuserve.bench.calls.messages import Encryption
from gpuserve.bench.plan.errors import BenchOptionError
from gpuserve.client.client_settings import GRPC, ServerUrl
from gpuserve.client.exceptions import ClientInvalidUrlError

PROTOCOLS = ("grpc", "http")
_OWN_HEADERS = frozenset(
    {"content-length", "content-type", "host", "te", "transfer-encoding", "connection", "grpc-timeout"}
)


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server. ``version`` "" is the server's choice; ``tls`` None is without encryption."""

    url: ServerUrl
    model: str
    version: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    tls: Encryption | None = None
    timeout_s: float = 30.0

    @property
    def is_grpc(self) -> bool:
        return self.url.protocol == GRPC


def parse_url(url: str | None, protocol: str | None) -> ServerUrl:
    """The server of ``--url`` and ``--protocol``, both optional; BenchOptionError: wrong, or at odds."""
    if protocol is not None and protocol not in PROTOCOLS:
        raise BenchOptionError("--protocol", f"expected grpc or http, given {protocol!r}")
    text = "localhost" if url is None else url
    try:
        found = ServerUrl.parse(text if "://" in text else f"{protocol or GRPC}://{text}")
    except ClientInvalidUrlError as error:
        raise BenchOptionError("--url", str(error)) from None
    if protocol is not None and found.protocol != protocol:
        raise BenchOptionError("--protocol", f"{protocol} does not go with --url {url}")
    return found


def parse_headers(texts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Headers written as ``name: value``; BenchOptionError: another form, or the load generator's own."""
    found = []
    for text in texts:
        name, colon, value = text.partition(":")
        name = name.strip().lower()
        if not (colon and name and name.isascii() and name.isprintable()) or "\n" in value or "\r" in value:
            raise BenchOptionError("--header", f"expected name: value, given {text!r}")
        if name in _OWN_HEADERS:
            raise BenchOptionError("--header", f"{name} is set by the load generator itself")
        found.append((name, value.strip()))
    return tuple(found)
