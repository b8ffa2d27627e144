"""The access token as each protocol carries it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpuserve.client.url import GRPC, HTTP

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


def extract_access_token_from_headers(headers: Mapping[str, str]) -> str | None:
    """The token in the headers of either protocol, None where there is none.

    Raises:
        ValueError: both are there and differ.
    """
    lower = {key.lower(): value for key, value in headers.items()}
    found = {lower[name] for name in HEADERS.values() if name in lower}
    if len(found) > 1:
        raise ValueError("Conflicting authentication headers found: the two access tokens differ")
    return found.pop() if found else None
