"""Forwarding of request headers that match a pattern as request parameters. Pure. Names are in lower case; if
an HTTP/1.1 client wrote a name otherwise, the parameter is there under the written name as well.

A header overrides a parameter of the same name: the body must not change what a gateway says.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

from gpuserve.config.settings.values import header_pattern
from gpuserve.core.errors import InvalidArgument
from gpuserve.front.ipc.gather import free_body
from gpuserve.front.net.exchange import Head
from gpuserve.front.protocols.access.authorization import token_headers
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.requests.limits import MAX_NAME_NBYTES, shown

#: Parameters that the protocol reads itself, and that clients refuse to send.
_RESERVED: Final = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
_RESERVED_PREFIX: Final = "triton_"
#: Headers of the connection, not of the request.
_NEVER: Final = frozenset({"te", "host", "content-type", "content-length", "inference-header-content-length"})
_TRANSPORT_PREFIXES: Final = (":", "grpc-")
#: The gRPC suffix of binary values.
_BINARY_SUFFIX: Final = "-bin"
#: The number of cached names: clients send the same few.
_REMEMBERED: Final = 1024


class HeaderForwarding:
    """The headers that a pattern selects. Created only if there is a pattern."""

    def __init__(self, pattern: str, secret: Iterable[str] = ()) -> None:
        self._never = _NEVER | token_headers(()) | frozenset(secret)
        self._search = header_pattern(pattern).search
        self._selects = functools.lru_cache(_REMEMBERED)(self._is_selected)

    def parameters(
        self, headers: Iterable[tuple[bytes, bytes]], spelled: Iterable[tuple[bytes, bytes]] = ()
    ) -> dict[str, str]:
        """Return the parameters of headers, joined by ", " if repeated. Raise InvalidArgument if reserved."""
        found: dict[str, str] = {}
        for raw_name, raw_value in headers:
            if not self._selects(raw_name):
                continue
            name, value = _text(raw_name).lower(), _text(raw_value)
            if name in _RESERVED or name.startswith(_RESERVED_PREFIX):
                text = f"header '{shown(name)}' has the name of a parameter and cannot be forwarded"
                raise InvalidArgument(text)
            found[name] = f"{found[name]}, {value}" if name in found else value
        written = {_text(raw): found[name] for lower, raw in spelled if (name := _text(lower)) in found}
        return found | written

    def parameters_of(self, head: Head) -> dict[str, str]:
        """Return the parameters of a head, computed once for all requests that share the head."""
        if head.forwarded is None:
            head.forwarded = self.parameters(head.headers, head.spelled)
        return head.forwarded

    def add_to(self, request: InferRequest, head: Head) -> None:
        """Add the parameters of a head to the request. Free the body if that fails."""
        found = head.forwarded
        if found is None:
            try:
                found = self.parameters_of(head)
            except InvalidArgument:
                free_body(request)
                raise
        add_forwarded(request, found)

    def _is_selected(self, raw_name: bytes) -> bool:
        name = _text(raw_name).lower()
        # No parameter has a longer name, and the pattern may be slow on long names.
        if len(raw_name) > MAX_NAME_NBYTES or name in self._never or name.endswith(_BINARY_SUFFIX):
            return False
        return not name.startswith(_TRANSPORT_PREFIXES) and self._search(name) is not None


def add_forwarded(request: InferRequest, forwarded: dict[str, str]) -> None:
    """Override a request's parameters by forwarded headers, which it shares if it has none of its own."""
    request.parameters = {**request.parameters, **forwarded} if request.parameters else forwarded


def header_forwarding(pattern: str, secret: Iterable[str] = ()) -> HeaderForwarding | None:
    """Return the forwarding for a pattern without the ``secret`` headers, or None if the pattern is ""."""
    return HeaderForwarding(pattern, secret) if pattern else None


def _text(raw: bytes) -> str:
    return raw.decode("latin-1")
