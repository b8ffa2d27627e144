"""A request line over HTTP to a ``Route``, or why there is none. Pure: no file system is touched. A model's
name is its percent-decoded path segment: slashes, dots and NULs are a name that no model has.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from gpuserve.config.settings.values import ADMIN, DASHBOARD
from gpuserve.front.doors.access.endpoints import METHODS, Endpoint


class Route(NamedTuple):
    """An endpoint, and the model or the region it is about; what the path does not name is ""."""

    endpoint: Endpoint
    model_name: str = ""
    model_version: str = ""
    region_name: str = ""

    @property
    def version(self) -> tuple[str, str]:
        return self.model_name, self.model_version


class Refusal(NamedTuple):
    """A request line that leads nowhere: an HTTP status and text, and for 405 the methods allowed."""

    status: int
    text: str
    allow: str = ""


NOT_FOUND: Final = Refusal(404, "Not Found")
#: So many paths are remembered, none of them longer than this: clients send the same few, and may send any.
_REMEMBERED: Final = 1024
_REMEMBERED_NBYTES: Final = 256
#: The groups that a server may be without.
_OPTIONAL: Final = frozenset({ADMIN, DASHBOARD})


def match(method: str, raw_path: bytes, opened: Container[str] = ()) -> Route | Refusal:
    """The route of a request line, whose path is still percent-encoded; a query string does not count.
    ``opened`` are the groups that this server has of those that not every one has. Refused are unknown paths
    (404), methods (405) and calls of gRPC that do not say so (415).
    """
    routes = (_remembered if len(raw_path) <= _REMEMBERED_NBYTES else _routes_of)(raw_path)
    if not routes or not _is_there(routes[0].endpoint, opened):
        return _of_grpc(method) if raw_path.decode("latin-1") in METHODS else NOT_FOUND
    for route in routes:
        if route.endpoint.method == method:
            return route
    allowed = dict.fromkeys(route.endpoint.method for route in routes)
    return Refusal(405, "Method Not Allowed", ", ".join(allowed))


def _is_there(endpoint: Endpoint, opened: Container[str]) -> bool:
    group = endpoint.access.group
    return group not in _OPTIONAL or group in opened or endpoint is Endpoint.ROOT


def _of_grpc(method: str) -> Refusal:
    """What is said of a method of gRPC that is asked for by something else than a call of gRPC."""
    if method != "POST":
        return Refusal(405, "Method Not Allowed", "POST")
    return Refusal(415, "a call of gRPC has the content type application/grpc or application/grpc+proto")


def _routes_of(raw_path: bytes) -> list[Route]:
    """The routes of a path, by whatever method."""
    path = raw_path.partition(b"?")[0]
    found = ((endpoint, endpoint.pattern.fullmatch(path)) for endpoint in Endpoint)
    return [Route(endpoint, **_names(match.groupdict(b""))) for endpoint, match in found if match]


_remembered = functools.lru_cache(_REMEMBERED)(_routes_of)


def _names(segments: dict[str, bytes]) -> dict[str, str]:
    """Segments percent-decoded; bytes that are not UTF-8 become U+FFFD, which no model's name holds."""
    names = {key: unquote_to_bytes(segment).decode(errors="replace") for key, segment in segments.items()}
    if version := names.get("model_version"):
        names["model_version"] = str(int(version))
    return names
