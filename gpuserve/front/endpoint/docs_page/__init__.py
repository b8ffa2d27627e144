"""The page at ``/docs``: one file of our own HTML, style and script, the same for every server.

It holds no data: the script reads ``/openapi.json`` and puts what that says into the page as text. The
headers allow nothing that is not in the file, and no connection to another server.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import Final, NamedTuple

#: No browser is to take an answer for anything but what its type says.
NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
_STYLE: Final = "/* style */"
_SCRIPT: Final = "/* script */"


class Page(NamedTuple):
    """The document and its headers."""

    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@functools.cache
def page() -> Page:
    """The page, put together when it is first asked for."""
    files = resources.files(__name__)
    html, style, script = (
        files.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    )
    body = html.replace(_STYLE, style).replace(_SCRIPT, script).encode()
    return Page(_headers(style, script, len(body)), body)


def _headers(style: str, script: str, nbytes: int) -> tuple[tuple[bytes, bytes], ...]:
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash(style)}",
            f"script-src {_hash(script)}",
            "connect-src 'self'",
            "img-src data:",  # the icon, which browsers ask for otherwise
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )
    return (
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", b"%d" % nbytes),
        (b"content-security-policy", policy.encode()),
        NOSNIFF,
        (b"referrer-policy", b"no-referrer"),
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
