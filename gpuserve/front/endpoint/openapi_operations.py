"""What each HTTP endpoint is, for whoever reads ``/openapi.json``: one table, beside that of ``routes``. Data
only; the document is made of it in ``openapi``.

An endpoint without a row is served but not described; a test names it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gpuserve.front.endpoint.routes import Endpoint

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"
EVENTS: Final = "text/event-stream"
MODEL: Final = "/v2/models/{model_name}"
VERSION: Final = "/versions/{model_version}"


class Operation(NamedTuple):
    """One endpoint: its ``paths``, and the names of the schemas of its body and of its answer ("" for none).

    ``answer_type`` "" stands for an empty answer. ``binary``: body and answer may also be JSON with tensors
    after it.
    """

    tag: str
    summary: str
    paths: tuple[str, ...]
    answer: str = ""
    body: str = ""
    description: str = ""
    answer_type: str = JSON
    body_required: bool = True
    binary: bool = False


def _of_model(tail: str = "") -> tuple[str, ...]:
    """The paths of an endpoint about a model: of its newest version, and of one that is named."""
    return MODEL + tail, MODEL + VERSION + tail


def _of_regions(kind: str, verb: str) -> tuple[str, ...]:
    """The paths of an endpoint about regions of shared memory: about all of them, and about one."""
    return f"/v2/{kind}/{verb}", f"/v2/{kind}/region/{{region_name}}/{verb}"


_SYSTEM: Final = "systemsharedmemory"
_CUDA: Final = "cudasharedmemory"
_TRACE_PATHS: Final = ("/v2/trace/setting", MODEL + "/trace/setting")

OPERATIONS: Final[dict[Endpoint, Operation]] = {
    Endpoint.SERVER_LIVE: Operation(
        "health",
        "Whether the server runs",
        ("/v2/health/live",),
        "Live",
        description="400 where it does not.",
    ),
    Endpoint.SERVER_READY: Operation(
        "health",
        "Whether every model takes requests",
        ("/v2/health/ready",),
        "Ready",
        description="400 where one does not, or where the server stops.",
    ),
    Endpoint.SERVER_STARTED: Operation(
        "health",
        "Whether every model was loaded once",
        ("/v2/health/startup",),
        "Started",
        description="400 while the server starts; 200 from then on.",
    ),
    Endpoint.MODEL_READY: Operation(
        "health", "Whether a model takes requests", _of_model("/ready"), "Ready", description="400 where not."
    ),
    Endpoint.SERVER_METADATA: Operation(
        "metadata", "Name, version and extensions of the server", ("/v2",), "ServerMetadata"
    ),
    Endpoint.MODEL_METADATA: Operation(
        "metadata", "Inputs and outputs of a model", _of_model(), "ModelMetadata"
    ),
    Endpoint.MODEL_CONFIG: Operation(
        "metadata", "Configuration of a model", _of_model("/config"), "ModelConfig"
    ),
    Endpoint.MODEL_INFER: Operation(
        "inference",
        "Run a model",
        _of_model("/infer"),
        "InferResponse",
        "InferRequest",
        "With the header Inference-Header-Content-Length the body is that many bytes of JSON and after them "
        "the binary tensors, in the order of the inputs that have 'binary_data_size' in their parameters. "
        "The answer is of the same form where outputs are asked for with 'binary_data'. gzip and deflate "
        "work both ways.",
        binary=True,
    ),
    Endpoint.MODEL_GENERATE: Operation(
        "inference",
        "Run a model by plain JSON",
        _of_model("/generate"),
        "GenerateResponse",
        "GenerateRequest",
        "For models that give exactly one response.",
    ),
    Endpoint.MODEL_GENERATE_STREAM: Operation(
        "inference",
        "Run a model by plain JSON, and stream its responses",
        _of_model("/generate_stream"),
        "GenerateResponse",
        "GenerateRequest",
        "Every response is a server-sent event, as it is produced. An error after the first one is an event "
        "as well.",
        answer_type=EVENTS,
    ),
    Endpoint.REPOSITORY_INDEX: Operation(
        "repository",
        "All models and their states",
        ("/v2/repository/index",),
        "RepositoryIndex",
        "RepositoryIndexRequest",
        body_required=False,
    ),
    Endpoint.MODEL_STATISTICS: Operation(
        "statistics",
        "What became of the requests of all models, or of one",
        ("/v2/models/stats", *_of_model("/stats")),
        "ModelStatistics",
    ),
    Endpoint.REPOSITORY_LOAD: Operation(
        "repository",
        "Load a model, or load it again",
        ("/v2/repository/models/{model_name}/load",),
        "",
        "RepositoryLoadRequest",
        "Where loading fails, the version that was loaded goes on serving.",
        answer_type="",
        body_required=False,
    ),
    Endpoint.REPOSITORY_UNLOAD: Operation(
        "repository",
        "Unload a model",
        ("/v2/repository/models/{model_name}/unload",),
        "",
        "RepositoryUnloadRequest",
        answer_type="",
        body_required=False,
    ),
    Endpoint.REPOSITORY_NAMED: Operation(
        "repository",
        "Always an error: no repository has a name",
        (
            "/v2/repository/{repository_name}/index",
            "/v2/repository/{repository_name}/models/{model_name}/load",
            "/v2/repository/{repository_name}/models/{model_name}/unload",
        ),
        answer_type="",
    ),
    Endpoint.SYSTEM_REGION_STATUS: Operation(
        "shared memory", "Regions of system memory", _of_regions(_SYSTEM, "status"), "SystemRegions"
    ),
    Endpoint.SYSTEM_REGION_REGISTER: Operation(
        "shared memory",
        "Register a region of system memory",
        _of_regions(_SYSTEM, "register")[1:],
        body="SystemRegisterRequest",
        answer_type="",
    ),
    Endpoint.SYSTEM_REGION_UNREGISTER: Operation(
        "shared memory",
        "Unregister regions of system memory",
        _of_regions(_SYSTEM, "unregister"),
        answer_type="",
    ),
    Endpoint.CUDA_REGION_STATUS: Operation(
        "shared memory", "Regions of GPU memory", _of_regions(_CUDA, "status"), "CudaRegions"
    ),
    Endpoint.CUDA_REGION_REGISTER: Operation(
        "shared memory",
        "Register a region of GPU memory",
        _of_regions(_CUDA, "register")[1:],
        body="CudaRegisterRequest",
        answer_type="",
    ),
    Endpoint.CUDA_REGION_UNREGISTER: Operation(
        "shared memory", "Unregister regions of GPU memory", _of_regions(_CUDA, "unregister"), answer_type=""
    ),
    Endpoint.GPUS: Operation(
        "statistics",
        "The GPUs: their health, what they do, and what models have of their memory",
        ("/v2/gpus",),
        "Gpus",
        description="Not part of the protocol. Empty where no GPU is watched.",
    ),
    Endpoint.METRICS: Operation(
        "statistics", "Metrics in Prometheus' text format", ("/metrics",), answer_type="text/plain"
    ),
    Endpoint.TRACE_SETTING: Operation("trace", "Trace settings", _TRACE_PATHS, "TraceSettings"),
    Endpoint.TRACE_UPDATE: Operation(
        "trace",
        "Change trace settings",
        _TRACE_PATHS,
        "TraceSettings",
        "TraceSettings",
        "Of the server, or of one model.",
    ),
    Endpoint.LOGGING: Operation("logging", "Log settings", ("/v2/logging",), "LogSettings"),
    Endpoint.LOGGING_UPDATE: Operation(
        "logging", "Change log settings", ("/v2/logging",), "LogSettings", "LogSettings"
    ),
    Endpoint.OPENAPI: Operation("description", "This description", ("/openapi.json",), "OpenApi"),
    Endpoint.DOCS: Operation("description", "A page that shows it", ("/docs",), answer_type="text/html"),
}
