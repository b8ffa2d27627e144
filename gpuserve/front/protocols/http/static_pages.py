"""The files of two pages, equal for all servers and without data: the dashboard at ``/``, whose scripts
show data of ``/dashboard/…`` and the v2 protocol, and ``/docs``, whose script shows ``/openapi.json``.
The headers allow only these files, of this server.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final, NamedTuple

from gpuserve.front.net.exchange import AnswerHead, Header

#: Browsers must not guess the content type.
NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
#: Browsers must neither guess the content type nor let other sites read the response.
GUARDS: Final[tuple[Header, ...]] = (NOSNIFF, (b"cross-origin-resource-policy", b"same-origin"))
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_NO_REFERRER: Final = (b"referrer-policy", b"no-referrer")


class File(NamedTuple):
    """A file, and the head of its response."""

    head: AnswerHead
    body: bytes


@functools.cache
def dashboard_files() -> Mapping[str, File]:
    """Return the page, its style and its scripts by name, read on first use."""
    found = {name: (name.rpartition(".")[2], body) for name, body in _contents("dashboard_page").items()}
    return {name: _dashboard_file(kind, body) for name, (kind, body) in found.items() if kind in _TYPES}


@functools.cache
def docs_page() -> File:
    """Return the page, assembled of its files on first use."""
    found = {name: body.decode() for name, body in _contents("docs_page").items()}
    html, style, script = (found[f"page.{kind}"] for kind in _TYPES)
    body = html.replace("/* style */", style).replace("/* script */", script).encode()
    headers = (_type_of("html"), _policy(_hash(style), _hash(script)), NOSNIFF, _NO_REFERRER)
    return File(AnswerHead(200, headers), body)


def _contents(folder: str) -> dict[str, bytes]:
    from importlib import resources  # slow to import, and most servers never need it

    files = resources.files(__package__) / folder
    return {one.name: one.read_bytes() for one in files.iterdir() if one.is_file()}


def _dashboard_file(kind: str, body: bytes) -> File:
    headers: tuple[Header, ...] = (_type_of(kind), (b"cache-control", b"no-cache"), *GUARDS)
    if kind == "html":
        opener = (b"cross-origin-opener-policy", b"same-origin")
        policy = _policy("'self'", "'self'", "trusted-types 'none'")
        headers += (policy, opener, _NO_REFERRER, (b"vary", b"accept"))
    return File(AnswerHead(200, headers), body)


def _type_of(kind: str) -> Header:
    return b"content-type", f"{_TYPES[kind]}; charset=utf-8".encode()


def _policy(styles: str, scripts: str, *more: str) -> Header:
    rules = (
        *("default-src 'none'", f"style-src {styles}", f"script-src {scripts}", "connect-src 'self'"),
        "img-src data:",  # the icon, which browsers request otherwise
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        *("require-trusted-types-for 'script'", *more),
    )
    return b"content-security-policy", "; ".join(rules).encode()


def _hash(text: str) -> str:
    import base64
    import hashlib

    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
