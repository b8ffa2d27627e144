"""Request headers that match the server's pattern become parameters. Pure. Names are in lower case. A header
stands over a parameter of the same name: what a gateway says is not for a request's body to change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

from gpuserve.config.settings.values import header_pattern
from gpuserve.core.errors import InvalidArgument
from gpuserve.front.doors.access.restrictions import token_headers
from gpuserve.front.exchange.exchange import Head
from gpuserve.front.ipc.gather import free_body
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.requests.limits import MAX_NAME_NBYTES, shown

#: The protocol reads parameters of these names itself, and clients refuse to send them.
_RESERVED: Final = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
_RESERVED_PREFIX: Final = "triton_"
#: Of the connection, not of the request.
_NEVER: Final = frozenset(
    {
        "te",
        "host",
        "content-type",
        "content-length",
        "inference-header-content-length",
    }
)
_TRANSPORT_PREFIXES: Final = (":", "grpc-")
#: gRPC's mark of values that are no text.
_BINARY_SUFFIX: Final = "-bin"
#: Clients send the same few names again and again.
_REMEMBERED: Final = 1024


class HeaderForwarding:
    """The headers that one pattern selects. Made only where there is a pattern."""

    def __init__(self, pattern: str, secret: Iterable[str] = ()) -> None:
        self._never = _NEVER | token_headers(()) | frozenset(secret)
        self._search = header_pattern(pattern).search
        self._selects = functools.lru_cache(_REMEMBERED)(self._is_selected)

    def parameters(self, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
        """The parameters of the headers, repeated ones joined by ", "; InvalidArgument: a reserved name."""
        found: dict[str, str] = {}
        for raw_name, raw_value in headers:
            if not self._selects(raw_name):
                continue
            name, value = _text(raw_name).lower(), _text(raw_value)
            if name in _RESERVED or name.startswith(_RESERVED_PREFIX):
                raise InvalidArgument(
                    f"header '{shown(name)}' has the name of a parameter and cannot be forwarded"
                )
            found[name] = f"{found[name]}, {value}" if name in found else value
        return found

    def of(self, head: Head) -> dict[str, str]:
        """The parameters of a head, found once for all requests that share it."""
        if head.forwarded is None:
            head.forwarded = self.parameters(head.headers)
        return head.forwarded

    def add_to(self, request: InferRequest, head: Head) -> None:
        """Put the parameters of a head into the request; its body is freed where that fails."""
        found = head.forwarded
        if found is None:
            try:
                found = self.of(head)
            except InvalidArgument:
                free_body(request)
                raise
        add(request, found)

    def _is_selected(self, raw_name: bytes) -> bool:
        name = _text(raw_name).lower()
        # No parameter has a longer name, and a pattern may take long over long names.
        if len(raw_name) > MAX_NAME_NBYTES or name in self._never or name.endswith(_BINARY_SUFFIX):
            return False
        return not name.startswith(_TRANSPORT_PREFIXES) and self._search(name) is not None


def add(request: InferRequest, forwarded: dict[str, str]) -> None:
    """Put forwarded headers over a request's parameters. Those that have none share those of a head."""
    request.parameters = {**request.parameters, **forwarded} if request.parameters else forwarded


def forwarding(pattern: str, secret: Iterable[str] = ()) -> HeaderForwarding | None:
    """What forwards the headers of a pattern, but for ``secret`` ones (lower case); None where it is ""."""
    return HeaderForwarding(pattern, secret) if pattern else None


def _text(raw: bytes) -> str:
    return raw.decode("latin-1")
