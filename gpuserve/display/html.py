"""Tables and lines of HTML. Whoever calls this gives text; what is markup is decided here alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write rows below a head, as HTML with nothing in it left to be read as HTML."""
    titles = "".join(f"<th>{escape(one)}</th>" for one in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(str(one))}</td>' for one in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


def line(name: str, text: str) -> str:
    """Write what something is in bold, and text behind it."""
    return f"<div><b>{escape(name)}</b> {escape(text)}</div>"
