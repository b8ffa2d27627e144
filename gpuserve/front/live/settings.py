"""The settings of the server as the live page shows them. Nothing secret is in it: no token, no path of
a key, no value that a header or a trace carries along. Pure.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Iterator
from typing import Any, Final

from gpuserve.config.settings.server import ServerSettings
from gpuserve.model.options import Row, rows

#: Where keys and certificates are, and what may hold a secret of another service: it is told whether they are
#: given, and no more.
_WITHHELD: Final = frozenset({"tls_certfile", "tls_client_ca", "tls_keyfile", "trace.resource"})


class ShownSettings:
    """The settings that are in force ``now``."""

    def __init__(self, now: ServerSettings) -> None:
        self.now = now

    def document(self) -> list[dict[str, Any]]:
        """Each setting with its value, or whether it is given, and whether that is the default."""
        return list(_told(self.now, ""))


def _told(table: Any, prefix: str) -> Iterator[dict[str, Any]]:
    for name, row in rows(type(table)).items():
        value = getattr(table, name)
        if dataclasses.is_dataclass(value):
            yield from _told(value, f"{prefix}{name}.")
        else:
            yield _setting(prefix + name, row, value)


def _setting(name: str, row: Row, value: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"name": name, "is_default": value == row.default}
    if row.option.secret or name in _WITHHELD:
        told["is_given"] = value not in (None, (), {})
    else:
        told["value"] = _without_user(value) if isinstance(value, str) else value
    return told | {"description": row.option.description}


def _without_user(text: str) -> str:
    """A URL without the name and the password in it; any other text as it is."""
    if "@" not in text or "://" not in text:
        return text
    try:
        parts = urllib.parse.urlsplit(text)
    except ValueError:
        return ""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
