"""The page at ``/docs``: one file of our own, the same for every server, without data. The script shows
``/openapi.json`` as text; the headers allow nothing but the file, and no other server.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from gpuserve.front.exchange.exchange import AnswerHead

#: No browser is to take an answer for anything but what its type says.
NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
_STYLE: Final = "/* style */"
_SCRIPT: Final = "/* script */"


class Page(NamedTuple):
    """The document, and the head of the response that it is the body of."""

    head: AnswerHead
    body: bytes


@functools.cache
def page() -> Page:
    """The page, put together when it is first asked for."""
    from importlib import resources  # which is slow to import, and most servers are never asked for the page

    files = resources.files(__name__)
    html, style, script = (
        files.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    )
    body = html.replace(_STYLE, style).replace(_SCRIPT, script).encode()
    return Page(_head(style, script), body)


def _head(style: str, script: str) -> AnswerHead:
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
    return AnswerHead(
        200,
        (
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", policy.encode()),
            NOSNIFF,
            (b"referrer-policy", b"no-referrer"),
        ),
    )


def _hash(text: str) -> str:
    import base64
    import hashlib

    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
