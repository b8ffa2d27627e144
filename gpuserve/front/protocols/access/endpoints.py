"""The table of all endpoints: paths, methods, and the access that each needs; and the routes of HTTP.

An endpoint that is not in the table is refused as unknown. Routing is pure: no file system is touched. The
name of a model is its percent-decoded path segment, so slashes, dots and NULs give a name that no model has.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Container, Mapping
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from gpuserve.config.settings.values import ADMIN, DASHBOARD


class AccessKind(enum.Enum):
    """The effect of an endpoint on the server, which decides which clients may use the endpoint."""

    USE = "uses the server, or reads public state"
    CONTROL = "changes the server for all its clients"
    INSIGHT = "shows data for operators"
    EITHER = "changes the server if the request contains changes"
    BARE = "shows no data, so it needs no protection"


class Access(NamedTuple):
    """An endpoint's group and kind. ``shows``: without a token of its own group, theirs are needed too."""

    group: str
    kind: AccessKind = AccessKind.USE
    shows: tuple[str, ...] = ()


_HEALTH: Final = Access("health")
_METADATA: Final = Access("metadata")
_INFERENCE: Final = Access("inference")
_STATISTICS: Final = Access("statistics")
_REPOSITORY: Final = Access("model-repository")
_REPOSITORY_CONTROL: Final = Access("model-repository", AccessKind.CONTROL)
_REGION: Final = Access("shared-memory")
_REGION_CONTROL: Final = Access("shared-memory", AccessKind.CONTROL)
_ADMIN_CONTROL: Final = Access(ADMIN, AccessKind.CONTROL)
_PAGE: Final = Access(DASHBOARD, AccessKind.BARE)
_ON_PAGE: Final = Access(
    DASHBOARD, AccessKind.INSIGHT, shows=(ADMIN, "metadata", "model-config", "model-repository", "statistics")
)

_MODEL: Final = "/v2/models/(?P<model_name>[^/]+)"
#: More digits than any version has, and few enough for any integer parser.
_VERSION: Final = f"{_MODEL}(?:/versions/(?P<model_version>[0-9]{{1,18}}))?"
_REPOSITORY_MODEL: Final = "/v2/repository/models/(?P<model_name>[^/]+)"
_TRACE: Final = f"(?:/v2|{_MODEL})/trace/setting"
_SYSTEM: Final = "/v2/systemsharedmemory(?:/region/(?P<region_name>[^/]+))?"
_CUDA: Final = "/v2/cudasharedmemory(?:/region/(?P<region_name>[^/]+))?"
ADMIN_PREFIX: Final = "/v2/admin/"
OPENAI_PREFIX: Final = "/v1/"
DASHBOARD_PREFIX: Final = "/dashboard/"
_ADMIN_MODEL: Final = f"{ADMIN_PREFIX}models/(?P<model_name>[^/]+)"


class Endpoint(enum.Enum):
    """The endpoints of both protocols. If two share a path and a method, the first one matches."""

    def __init__(self, method: str, path: str, access: Access, rpc: str = "") -> None:
        self.method = method
        self.path = path
        self.pattern = re.compile(path.encode())
        self.access = access
        self.rpc = rpc

    #: Endpoints are hashed for every request, and ``Enum.__hash__`` is a Python function.
    __hash__ = object.__hash__

    SERVER_METADATA = "GET", "/v2/?", _METADATA, "ServerMetadata"
    MODELS = "GET", "/v2/models/?", _METADATA
    SERVER_LIVE = "GET", "/v2/health/live", _HEALTH, "ServerLive"
    SERVER_READY = "GET", "/(?:v2/)?health/ready", _HEALTH, "ServerReady"
    SERVER_STARTED = "GET", "/v2/health/startup", _HEALTH
    MODEL_STATISTICS = "GET", f"/v2/models/stats|{_VERSION}/stats", _STATISTICS, "ModelStatistics"
    MODEL_METADATA = "GET", _VERSION, _METADATA, "ModelMetadata"
    MODEL_READY = "GET", f"{_VERSION}/ready", _HEALTH, "ModelReady"
    MODEL_CONFIG = "GET", f"{_VERSION}/config", Access("model-config"), "ModelConfig"
    MODEL_INFER = "POST", f"{_VERSION}/infer", _INFERENCE, "ModelInfer"
    MODEL_GENERATE = "POST", f"{_VERSION}/generate", _INFERENCE
    MODEL_GENERATE_STREAM = "POST", f"{_VERSION}/generate_stream", _INFERENCE
    OPENAI_MODELS = "GET", "/v1/models", _METADATA
    OPENAI_MODEL = "GET", f"{OPENAI_PREFIX}models/(?P<model_name>[^/]+)", _METADATA
    OPENAI_CHAT = "POST", "/v1/chat/completions", _INFERENCE
    OPENAI_COMPLETIONS = "POST", "/v1/completions", _INFERENCE
    OPENAI_EMBEDDINGS = "POST", "/v1/embeddings", _INFERENCE
    REPOSITORY_INDEX = "POST", "/v2/repository/index", _REPOSITORY, "RepositoryIndex"
    REPOSITORY_LOAD = "POST", f"{_REPOSITORY_MODEL}/load", _REPOSITORY_CONTROL, "RepositoryModelLoad"
    REPOSITORY_UNLOAD = "POST", f"{_REPOSITORY_MODEL}/unload", _REPOSITORY_CONTROL, "RepositoryModelUnload"
    #: A named repository, which does not exist.
    REPOSITORY_NAMED = "POST", "/v2/repository/[^/]*/(index|models/[^/]*/(load|unload))", _REPOSITORY
    SYSTEM_REGION_STATUS = "GET", f"{_SYSTEM}/status", _REGION, "SystemSharedMemoryStatus"
    SYSTEM_REGION_REGISTER = "POST", f"{_SYSTEM}/register", _REGION_CONTROL, "SystemSharedMemoryRegister"
    SYSTEM_REGION_UNREGISTER = (
        "POST",
        f"{_SYSTEM}/unregister",
        _REGION_CONTROL,
        "SystemSharedMemoryUnregister",
    )
    CUDA_REGION_STATUS = "GET", f"{_CUDA}/status", _REGION, "CudaSharedMemoryStatus"
    CUDA_REGION_REGISTER = "POST", f"{_CUDA}/register", _REGION_CONTROL, "CudaSharedMemoryRegister"
    CUDA_REGION_UNREGISTER = "POST", f"{_CUDA}/unregister", _REGION_CONTROL, "CudaSharedMemoryUnregister"
    TRACE_SETTING = "GET", _TRACE, Access("trace")
    TRACE_UPDATE = "POST", _TRACE, Access("trace", AccessKind.CONTROL)
    LOGGING = "GET", "/v2/logging", Access("logging")
    LOGGING_UPDATE = "POST", "/v2/logging", Access("logging", AccessKind.CONTROL)
    GPUS = "GET", "/v2/gpus", _STATISTICS
    METRICS = "GET", "/metrics", _STATISTICS  # not on the metrics port, which is never restricted
    OPENAPI = "GET", r"/openapi\.json", _METADATA
    DOCS = "GET", "/docs", _METADATA
    #: The dashboard for clients that may see it, otherwise an index of links.
    ROOT = "GET", "/", _PAGE
    DASHBOARD_FILE = "GET", rf"{DASHBOARD_PREFIX}[a-z]+\.(css|js)", _PAGE
    DASHBOARD_LIVE = "GET", f"{DASHBOARD_PREFIX}live", _ON_PAGE
    DASHBOARD_HISTORY = (
        "GET",
        f"{DASHBOARD_PREFIX}history(?:/(?P<model_name>[^/]+)/(?P<model_version>[0-9]{{1,18}}))?",
        _ON_PAGE,
    )
    DASHBOARD_CONFIG = "GET", f"{DASHBOARD_PREFIX}config", _ON_PAGE
    ADMIN_STATUS = "GET", f"{ADMIN_PREFIX}status", Access(ADMIN, AccessKind.INSIGHT)
    ADMIN_DRAIN = "POST", f"{ADMIN_PREFIX}drain", _ADMIN_CONTROL
    ADMIN_RELOAD = "POST", f"{ADMIN_PREFIX}reload", _ADMIN_CONTROL
    ADMIN_MODEL_LOAD = "POST", f"{_ADMIN_MODEL}/load", _ADMIN_CONTROL
    ADMIN_MODEL_UNLOAD = "POST", f"{_ADMIN_MODEL}/unload", _ADMIN_CONTROL
    ADMIN_MODEL_RELOAD = "POST", f"{_ADMIN_MODEL}/reload", _ADMIN_CONTROL
    ADMIN_MODEL_SCALE = "POST", f"{_ADMIN_MODEL}/scale", _ADMIN_CONTROL


_V2: Final = "/inference.GRPCInferenceService/"
#: The gRPC methods: those of the table, and those without an HTTP equivalent.
METHODS: Final[Mapping[str, Access]] = {
    **{_V2 + endpoint.rpc: endpoint.access for endpoint in Endpoint if endpoint.rpc},
    _V2 + "ModelStreamInfer": _INFERENCE,
    _V2 + "TraceSetting": Access("trace", AccessKind.EITHER),
    _V2 + "LogSettings": Access("logging", AccessKind.EITHER),
    "/grpc.health.v1.Health/Check": _HEALTH,
    "/grpc.health.v1.Health/Watch": _HEALTH,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _METADATA,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _METADATA,
}


# ---- routes --------------------------------------------------------------------------------------


class Route(NamedTuple):
    """An endpoint with the model or region of the path. Parts that the path does not name are ""."""

    endpoint: Endpoint
    model_name: str = ""
    model_version: str = ""
    region_name: str = ""

    @property
    def version(self) -> tuple[str, str]:
        return self.model_name, self.model_version


class RouteError(NamedTuple):
    """The error for a request line without a route: HTTP status and text, and the allowed methods for 405."""

    status: int
    text: str
    allow: str = ""


NOT_FOUND: Final = RouteError(404, "Not Found")
_NO_GRPC: Final = RouteError(
    415, "a call of gRPC has the content type application/grpc or application/grpc+proto"
)
#: The number and the maximum length of cached paths: clients send the same few, and may send any.
_REMEMBERED: Final = 1024
_REMEMBERED_NBYTES: Final = 256
#: The groups that a server may have disabled.
_OPTIONAL: Final = frozenset({ADMIN, DASHBOARD})


def match_route(method: str, raw_path: bytes, enabled: Container[str] = ()) -> Route | RouteError:
    """Return the route of a request line. ``raw_path`` is percent-encoded, its query is ignored; ``enabled``:
    the optional groups that this server has. Errors are an unknown path (404), a wrong method (405), and a
    gRPC call without the content type of gRPC (415).
    """
    routes = (_remembered if len(raw_path) <= _REMEMBERED_NBYTES else _routes_of)(raw_path)
    first = routes[0].endpoint if routes else None
    group = "" if first is None or first is Endpoint.ROOT else first.access.group
    if not routes or (group in _OPTIONAL and group not in enabled):
        if raw_path.decode("latin-1") not in METHODS:
            return NOT_FOUND
        return _NO_GRPC if method == "POST" else RouteError(405, "Method Not Allowed", "POST")
    for route in routes:
        if route.endpoint.method == method:
            return route
    allowed = dict.fromkeys(route.endpoint.method for route in routes)
    return RouteError(405, "Method Not Allowed", ", ".join(allowed))


def _routes_of(raw_path: bytes) -> list[Route]:
    path = raw_path.partition(b"?")[0]
    found = ((endpoint, endpoint.pattern.fullmatch(path)) for endpoint in Endpoint)
    routes = []
    for endpoint, matched in found:
        if matched:
            # Bytes that are not UTF-8 become U+FFFD, which no name has.
            parts = matched.groupdict(b"").items()
            names = {key: unquote_to_bytes(part).decode(errors="replace") for key, part in parts}
            if version := names.get("model_version"):
                names["model_version"] = str(int(version))
            routes.append(Route(endpoint, **names))
    return routes


_remembered = functools.lru_cache(_REMEMBERED)(_routes_of)
