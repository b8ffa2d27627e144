"""The HTTP endpoints and their paths: a request line to a ``Route``, or why there is none.

Pure. A model's name is whatever its path segment says once percent-decoded: slashes, dots and NULs
inside are just a name that no model has. Nothing here touches a file system.
"""

from __future__ import annotations

import enum
import functools
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

#: More digits than any version has, and few enough for any integer parser.
_MAX_VERSION_DIGITS: Final = 18


class Endpoint(enum.Enum):
    """What a path stands for; the value is the one method that it takes."""

    def __init__(self, _name: str, method: str) -> None:
        self.method = method

    #: Members are looked up for every request, and Enum's own is a Python function.
    __hash__ = object.__hash__

    SERVER_METADATA = ("server metadata", "GET")
    SERVER_LIVE = ("server live", "GET")
    SERVER_READY = ("server ready", "GET")
    SERVER_STARTED = ("server started", "GET")
    MODEL_METADATA = ("model metadata", "GET")
    MODEL_READY = ("model ready", "GET")
    MODEL_CONFIG = ("model config", "GET")
    MODEL_INFER = ("model infer", "POST")
    MODEL_GENERATE = ("model generate", "POST")
    MODEL_GENERATE_STREAM = ("model generate stream", "POST")
    MODEL_STATISTICS = ("model statistics", "GET")
    REPOSITORY_INDEX = ("repository index", "POST")
    REPOSITORY_LOAD = ("repository load", "POST")
    REPOSITORY_UNLOAD = ("repository unload", "POST")
    REPOSITORY_NAMED = ("repository named", "POST")
    SYSTEM_REGION_STATUS = ("system shared memory status", "GET")
    SYSTEM_REGION_REGISTER = ("system shared memory register", "POST")
    SYSTEM_REGION_UNREGISTER = ("system shared memory unregister", "POST")
    CUDA_REGION_STATUS = ("cuda shared memory status", "GET")
    CUDA_REGION_REGISTER = ("cuda shared memory register", "POST")
    CUDA_REGION_UNREGISTER = ("cuda shared memory unregister", "POST")
    TRACE_SETTING = ("trace setting", "GET")
    TRACE_UPDATE = ("trace update", "POST")
    LOGGING = ("logging", "GET")
    LOGGING_UPDATE = ("logging update", "POST")
    GPUS = ("gpus", "GET")
    METRICS = ("metrics", "GET")
    OPENAPI = ("openapi", "GET")
    DOCS = ("docs", "GET")
    ADMIN_STATUS = ("admin status", "GET")
    ADMIN_DRAIN = ("admin drain", "POST")
    ADMIN_RELOAD = ("admin reload", "POST")
    ADMIN_MODEL_LOAD = ("admin model load", "POST")
    ADMIN_MODEL_UNLOAD = ("admin model unload", "POST")
    ADMIN_MODEL_RELOAD = ("admin model reload", "POST")
    ADMIN_MODEL_SCALE = ("admin model scale", "POST")


class Route(NamedTuple):
    """An endpoint, and the model or the region it is about; what the path does not name is ""."""

    endpoint: Endpoint
    model_name: str = ""
    model_version: str = ""
    region_name: str = ""


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
    b"/v2/health/startup": Route(Endpoint.SERVER_STARTED),
    b"/v2/models/stats": Route(Endpoint.MODEL_STATISTICS),
    b"/v2/repository/index": Route(Endpoint.REPOSITORY_INDEX),
    b"/v2/trace/setting": Route(Endpoint.TRACE_SETTING),
    b"/v2/logging": Route(Endpoint.LOGGING),
    b"/v2/gpus": Route(Endpoint.GPUS),
    b"/metrics": Route(Endpoint.METRICS),
    b"/openapi.json": Route(Endpoint.OPENAPI),
    b"/docs": Route(Endpoint.DOCS),
}
_OF_MODEL: Final[dict[bytes, Endpoint]] = {
    b"": Endpoint.MODEL_METADATA,
    b"/ready": Endpoint.MODEL_READY,
    b"/config": Endpoint.MODEL_CONFIG,
    b"/stats": Endpoint.MODEL_STATISTICS,
    b"/infer": Endpoint.MODEL_INFER,
    b"/generate": Endpoint.MODEL_GENERATE,
    b"/generate_stream": Endpoint.MODEL_GENERATE_STREAM,
}
#: A model's, not a version's.
_TRACE_SETTING: Final = b"/trace/setting"
#: Paths that take a second method: what that one stands for.
_OTHER_METHOD: Final[dict[Endpoint, Endpoint]] = {
    Endpoint.TRACE_SETTING: Endpoint.TRACE_UPDATE,
    Endpoint.LOGGING: Endpoint.LOGGING_UPDATE,
}
_REPOSITORY: Final = b"/v2/repository/"
_OF_REPOSITORY_MODEL: Final[dict[bytes, Endpoint]] = {
    b"load": Endpoint.REPOSITORY_LOAD,
    b"unload": Endpoint.REPOSITORY_UNLOAD,
}
_OF_REGION: Final[dict[tuple[bytes, bytes], Endpoint]] = {
    (b"systemsharedmemory", b"status"): Endpoint.SYSTEM_REGION_STATUS,
    (b"systemsharedmemory", b"register"): Endpoint.SYSTEM_REGION_REGISTER,
    (b"systemsharedmemory", b"unregister"): Endpoint.SYSTEM_REGION_UNREGISTER,
    (b"cudasharedmemory", b"status"): Endpoint.CUDA_REGION_STATUS,
    (b"cudasharedmemory", b"register"): Endpoint.CUDA_REGION_REGISTER,
    (b"cudasharedmemory", b"unregister"): Endpoint.CUDA_REGION_UNREGISTER,
}
#: Before all paths of the admin API.
ADMIN_PREFIX: Final = "/v2/admin/"
_ADMIN: Final = ADMIN_PREFIX.encode()
_OF_ADMIN: Final[dict[bytes, Endpoint]] = {
    b"status": Endpoint.ADMIN_STATUS,
    b"drain": Endpoint.ADMIN_DRAIN,
    b"reload": Endpoint.ADMIN_RELOAD,
}
_OF_ADMIN_MODEL: Final[dict[bytes, Endpoint]] = {
    b"load": Endpoint.ADMIN_MODEL_LOAD,
    b"unload": Endpoint.ADMIN_MODEL_UNLOAD,
    b"reload": Endpoint.ADMIN_MODEL_RELOAD,
    b"scale": Endpoint.ADMIN_MODEL_SCALE,
}
_MODELS: Final = b"/v2/models/"
_VERSIONS: Final = b"/versions/"
#: So many paths are remembered, none of them longer than this: clients send the same few, and may send any.
_REMEMBERED: Final = 1024
_REMEMBERED_NBYTES: Final = 256


def match(method: str, raw_path: bytes, *, admin: bool = False) -> Route | Refusal:
    """The route of a request line: 404 for a path that does not exist, 405 for another method of it.

    The paths of the admin API exist where ``admin`` says so.
    """
    route = match_path(raw_path)
    if route is None and admin:
        route = _admin_route(raw_path.partition(b"?")[0])
    if route is None:
        return NOT_FOUND
    if route.endpoint.method == method:
        return route
    other = _OTHER_METHOD.get(route.endpoint)
    if other is None:
        return Refusal(405, "Method Not Allowed", route.endpoint.method)
    if other.method == method:
        return route._replace(endpoint=other)
    return Refusal(405, "Method Not Allowed", f"{route.endpoint.method}, {other.method}")


def match_path(raw_path: bytes) -> Route | None:
    """The route of a path as it was sent, still percent-encoded; a query string does not count.

    None for the paths of the admin API, whether there is one or not.
    """
    return _remembered_path(raw_path) if len(raw_path) <= _REMEMBERED_NBYTES else _match_path(raw_path)


def _match_path(raw_path: bytes) -> Route | None:
    path = raw_path.partition(b"?")[0]
    if not path.startswith(_MODELS):
        return _FIXED.get(path) or _repository_route(path) or _region_route(path)
    name, slash, rest = path[len(_MODELS) :].partition(b"/")
    version, tail = _split_version(slash + rest)
    endpoint = Endpoint.TRACE_SETTING if slash + rest == _TRACE_SETTING else _OF_MODEL.get(tail)
    if not name or version is None or endpoint is None:
        return None
    if endpoint is Endpoint.MODEL_METADATA and path in _FIXED:  # of all models, before one of that name
        return _FIXED[path]
    return Route(endpoint, _decode(name), version)


_remembered_path = functools.lru_cache(_REMEMBERED)(_match_path)


def _repository_route(path: bytes) -> Route | None:
    """Loading and unloading; the same, and the index, of a repository with a name, of which there is none."""
    if not path.startswith(_REPOSITORY):
        return None
    match path[len(_REPOSITORY) :].split(b"/"):
        case [b"models", name, verb] if name and verb in _OF_REPOSITORY_MODEL:
            return Route(_OF_REPOSITORY_MODEL[verb], _decode(name))
        case [_, b"index"] | [_, b"models", _, b"load" | b"unload"]:
            return Route(Endpoint.REPOSITORY_NAMED)
    return None


def _region_route(path: bytes) -> Route | None:
    """Regions of shared memory: one by its name, or all."""
    match path.split(b"/"):
        case [b"", b"v2", kind, b"region", name, verb] if name and (kind, verb) in _OF_REGION:
            return Route(_OF_REGION[kind, verb], region_name=_decode(name))
        case [b"", b"v2", kind, verb] if (kind, verb) in _OF_REGION:
            return Route(_OF_REGION[kind, verb])
    return None


def _admin_route(path: bytes) -> Route | None:
    """What operators ask: of the server, or of a model."""
    if not path.startswith(_ADMIN):
        return None
    match path[len(_ADMIN) :].split(b"/"):
        case [verb] if verb in _OF_ADMIN:
            return Route(_OF_ADMIN[verb])
        case [b"models", name, verb] if name and verb in _OF_ADMIN_MODEL:
            return Route(_OF_ADMIN_MODEL[verb], _decode(name))
    return None


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
