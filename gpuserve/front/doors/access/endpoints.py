"""The endpoints: the one table of both protocols, of where each is and what it does to the server. What is
not in the table is refused as if it did not exist, whatever a door could do.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from gpuserve.config.settings.values import ADMIN, DASHBOARD


class Kind(enum.Enum):
    USE = "uses it, or asks for something"
    CONTROL = "changes it, for all its clients"
    INSIGHT = "shows what is for its operators"
    EITHER = "changes it where the request says something to change"
    BARE = "tells nothing of it, so that nobody is kept from it"


class Access(NamedTuple):
    """Which group of endpoints one belongs to, and what it does. What it ``shows`` of other groups needs
    their tokens too, unless its own group has one.
    """

    group: str
    kind: Kind = Kind.USE
    shows: tuple[str, ...] = ()


_HEALTH: Final = Access("health")
_METADATA: Final = Access("metadata")
_INFERENCE: Final = Access("inference")
_STATISTICS: Final = Access("statistics")
_REPOSITORY: Final = Access("model-repository")
_REPOSITORY_CONTROL: Final = Access("model-repository", Kind.CONTROL)
_REGION: Final = Access("shared-memory")
_REGION_CONTROL: Final = Access("shared-memory", Kind.CONTROL)
_ADMIN_CONTROL: Final = Access(ADMIN, Kind.CONTROL)
_PAGE: Final = Access(DASHBOARD, Kind.BARE)
_ON_PAGE: Final = Access(
    DASHBOARD, Kind.INSIGHT, shows=(ADMIN, "metadata", "model-config", "model-repository", "statistics")
)

_MODEL: Final = "/v2/models/(?P<model_name>[^/]+)"
#: More digits than any version has, and few enough for any integer parser.
_VERSION: Final = f"{_MODEL}(?:/versions/(?P<model_version>[0-9]{{1,18}}))?"
_REPOSITORY_MODEL: Final = "/v2/repository/models/(?P<model_name>[^/]+)"
_TRACE: Final = f"(?:/v2|{_MODEL})/trace/setting"
_SYSTEM: Final = "/v2/systemsharedmemory(?:/region/(?P<region_name>[^/]+))?"
_CUDA: Final = "/v2/cudasharedmemory(?:/region/(?P<region_name>[^/]+))?"
#: Before all paths of the admin API.
ADMIN_PREFIX: Final = "/v2/admin/"
#: Before all paths of OpenAI's API.
OPENAI_PREFIX: Final = "/v1/"
#: Before all paths of what the live page asks for.
DASHBOARD_PREFIX: Final = "/dashboard/"
_ADMIN_MODEL: Final = f"{ADMIN_PREFIX}models/(?P<model_name>[^/]+)"


class Endpoint(enum.Enum):
    """An endpoint of either protocol. Of two that have a path and a method in common, the first is meant."""

    def __init__(self, method: str, path: str, access: Access, rpc: str = "") -> None:
        self.method = method
        self.path = path
        self.pattern = re.compile(path.encode())
        self.access = access
        self.rpc = rpc

    #: Members are looked up for every request, and Enum's own is a Python function.
    __hash__ = object.__hash__

    SERVER_METADATA = "GET", "/v2/?", _METADATA, "ServerMetadata"
    MODELS = "GET", "/v2/models/?", _METADATA
    SERVER_LIVE = "GET", "/v2/health/live", _HEALTH, "ServerLive"
    SERVER_READY = "GET", "/v2/health/ready", _HEALTH, "ServerReady"
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
    #: Of a repository with a name: always answered that there is none.
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
    TRACE_UPDATE = "POST", _TRACE, Access("trace", Kind.CONTROL)
    LOGGING = "GET", "/v2/logging", Access("logging")
    LOGGING_UPDATE = "POST", "/v2/logging", Access("logging", Kind.CONTROL)
    GPUS = "GET", "/v2/gpus", _STATISTICS
    METRICS = "GET", "/metrics", _STATISTICS  # not on the metrics port, which is never restricted
    OPENAPI = "GET", r"/openapi\.json", _METADATA
    DOCS = "GET", "/docs", _METADATA
    #: The live page where it is for the client, else what there is instead.
    ROOT = "GET", "/", _PAGE
    DASHBOARD_FILE = "GET", rf"{DASHBOARD_PREFIX}[a-z]+\.(css|js)", _PAGE
    DASHBOARD_LIVE = "GET", f"{DASHBOARD_PREFIX}live", _ON_PAGE
    DASHBOARD_HISTORY = (
        "GET",
        f"{DASHBOARD_PREFIX}history(?:/(?P<model_name>[^/]+)/(?P<model_version>[0-9]{{1,18}}))?",
        _ON_PAGE,
    )
    DASHBOARD_CONFIG = "GET", f"{DASHBOARD_PREFIX}config", _ON_PAGE
    ADMIN_STATUS = "GET", f"{ADMIN_PREFIX}status", Access(ADMIN, Kind.INSIGHT)
    ADMIN_DRAIN = "POST", f"{ADMIN_PREFIX}drain", _ADMIN_CONTROL
    ADMIN_RELOAD = "POST", f"{ADMIN_PREFIX}reload", _ADMIN_CONTROL
    ADMIN_MODEL_LOAD = "POST", f"{_ADMIN_MODEL}/load", _ADMIN_CONTROL
    ADMIN_MODEL_UNLOAD = "POST", f"{_ADMIN_MODEL}/unload", _ADMIN_CONTROL
    ADMIN_MODEL_RELOAD = "POST", f"{_ADMIN_MODEL}/reload", _ADMIN_CONTROL
    ADMIN_MODEL_SCALE = "POST", f"{_ADMIN_MODEL}/scale", _ADMIN_CONTROL


_V2: Final = "/inference.GRPCInferenceService/"
#: The methods of gRPC: those of the table, and those that have no like over HTTP.
METHODS: Final[Mapping[str, Access]] = {
    **{_V2 + endpoint.rpc: endpoint.access for endpoint in Endpoint if endpoint.rpc},
    _V2 + "ModelStreamInfer": _INFERENCE,
    _V2 + "TraceSetting": Access("trace", Kind.EITHER),
    _V2 + "LogSettings": Access("logging", Kind.EITHER),
    "/grpc.health.v1.Health/Check": _HEALTH,
    "/grpc.health.v1.Health/Watch": _HEALTH,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _METADATA,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _METADATA,
}
