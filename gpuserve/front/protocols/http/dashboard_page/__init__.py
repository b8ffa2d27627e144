"""The dashboard page at ``/``: static files without data, equal for all servers. Its script shows data of
``/dashboard/…`` and the v2 protocol; the headers allow only these files, of this server.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final, NamedTuple

from gpuserve.front.net.exchange import AnswerHead, Header

#: Browsers must neither guess the content type nor let other sites read the response.
GUARDS: Final[tuple[Header, ...]] = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "style-src 'self'",
        "script-src 'self'",
        "connect-src 'self'",
        "img-src data:",  # the icon, which browsers request otherwise
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


class File(NamedTuple):
    """A file, and the head of its response."""

    head: AnswerHead
    body: bytes


@functools.cache
def files() -> Mapping[str, File]:
    """Return the page, its style and its scripts by name, read on first use."""
    from importlib import resources  # slow to import, and most servers never need it

    found = ((one.name, one.name.rpartition(".")[2], one) for one in resources.files(__name__).iterdir())
    return {name: _file(kind, one.read_bytes()) for name, kind, one in found if kind in _TYPES}


def _file(kind: str, body: bytes) -> File:
    headers: tuple[Header, ...] = (
        (b"content-type", f"{_TYPES[kind]}; charset=utf-8".encode()),
        (b"cache-control", b"no-cache"),
        *GUARDS,
    )
    if kind == "html":
        headers += (
            (b"content-security-policy", _POLICY.encode()),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"referrer-policy", b"no-referrer"),
            (b"vary", b"accept"),
        )
    return File(AnswerHead(200, headers), body)
