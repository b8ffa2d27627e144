"""The HTTP endpoints and their paths: a request line to a ``Route``, or why there is none.

Pure. A model's name is whatever its path segment says once percent-decoded: slashes, dots and NULs
inside are just a name that no model has. Nothing here touches a file system.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

#: More digits than any version has, and few enough for any integer parser.
_MAX_VERSION_DIGITS: Final = 18


class Endpoint(enum.Enum):
    """What a path stands for; the value is the one method that it takes."""

    def __init__(self, _name: str, method: str) -> None:
        self.method = method

    SERVER_METADATA = ("server metadata", "GET")
    SERVER_LIVE = ("server live", "GET")
    SERVER_READY = ("server ready", "GET")
    MODEL_METADATA = ("model metadata", "GET")
    MODEL_READY = ("model ready", "GET")
    MODEL_CONFIG = ("model config", "GET")
    MODEL_INFER = ("model infer", "POST")
    MODEL_GENERATE = ("model generate", "POST")
    MODEL_GENERATE_STREAM = ("model generate stream", "POST")
    REPOSITORY_INDEX = ("repository index", "POST")
    METRICS = ("metrics", "GET")


class Route(NamedTuple):
    """An endpoint, and the model it is about. ``model_version`` is "" where the path names none."""

    endpoint: Endpoint
    model_name: str = ""
    model_version: str = ""


class Refusal(NamedTuple):
    """A request line that leads nowhere: an HTTP status and text, and for 405 the method allowed."""

    status: int
    text: str
    allow: str = ""


NOT_FOUND: Final = Refusal(404, "Not Found")

_FIXED: Final[dict[bytes, Route]] = {
    b"/v2": Route(Endpoint.SERVER_METADATA),
    b"/v2/": Route(Endpoint.SERVER_METADATA),
    b"/v2/health/live": Route(Endpoint.SERVER_LIVE),
    b"/v2/health/ready": Route(Endpoint.SERVER_READY),
    b"/v2/repository/index": Route(Endpoint.REPOSITORY_INDEX),
    b"/metrics": Route(Endpoint.METRICS),
}
_OF_MODEL: Final[dict[bytes, Endpoint]] = {
    b"": Endpoint.MODEL_METADATA,
    b"/ready": Endpoint.MODEL_READY,
    b"/config": Endpoint.MODEL_CONFIG,
    b"/infer": Endpoint.MODEL_INFER,
    b"/generate": Endpoint.MODEL_GENERATE,
    b"/generate_stream": Endpoint.MODEL_GENERATE_STREAM,
}
_MODELS: Final = b"/v2/models/"
_VERSIONS: Final = b"/versions/"


def match(method: str, raw_path: bytes) -> Route | Refusal:
    """The route of a request line: 404 for a path that does not exist, 405 for another method of it."""
    route = match_path(raw_path)
    if route is None:
        return NOT_FOUND
    if route.endpoint.method != method:
        return Refusal(405, "Method Not Allowed", route.endpoint.method)
    return route


def match_path(raw_path: bytes) -> Route | None:
    """The route of a path as it was sent, still percent-encoded; a query string does not count."""
    path = raw_path.partition(b"?")[0]
    if not path.startswith(_MODELS):
        return _FIXED.get(path)
    name, slash, rest = path[len(_MODELS) :].partition(b"/")
    version, tail = _split_version(slash + rest)
    endpoint = _OF_MODEL.get(tail)
    if not name or version is None or endpoint is None:
        return None
    return Route(endpoint, _decode(name), version)


def _split_version(rest: bytes) -> tuple[str | None, bytes]:
    """The version in what follows the name, and what follows it; None where it is no version."""
    if not rest.startswith(_VERSIONS):
        return "", rest
    digits, slash, tail = rest[len(_VERSIONS) :].partition(b"/")
    if not digits.isdigit() or len(digits) > _MAX_VERSION_DIGITS:
        return None, tail
    return str(int(digits)), slash + tail


def _decode(segment: bytes) -> str:
    """A percent-decoded name; bytes that are not UTF-8 become U+FFFD, which no model's name holds."""
    if b"%" in segment:
        segment = unquote_to_bytes(segment)
    return segment.decode(errors="replace")
