"""The page at ``/docs``: one static file without data, whose script shows ``/openapi.json`` as text."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from gpuserve.front.net.exchange import AnswerHead

#: Browsers must not guess the content type.
NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
_STYLE: Final = "/* style */"
_SCRIPT: Final = "/* script */"


class Page(NamedTuple):
    """The document, and the head of its response."""

    head: AnswerHead
    body: bytes


@functools.cache
def page() -> Page:
    """Return the page, assembled on first use."""
    from importlib import resources  # slow to import, and most servers never need it

    files = resources.files(__name__)
    html, style, script = (
        files.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    )
    body = html.replace(_STYLE, style).replace(_SCRIPT, script).encode()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash(style)}",
            f"script-src {_hash(script)}",
            "connect-src 'self'",
            "img-src data:",  # the icon, which browsers request otherwise
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )
    head = AnswerHead(
        200,
        (
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", policy.encode()),
            NOSNIFF,
            (b"referrer-policy", b"no-referrer"),
        ),
    )
    return Page(head, body)


def _hash(text: str) -> str:
    import base64
    import hashlib

    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
