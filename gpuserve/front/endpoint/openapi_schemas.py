"""The JSON bodies of the HTTP endpoints as JSON Schema: ``components.schemas`` of the OpenAPI document. Data
only; which endpoint takes or gives which is in ``openapi_operations``.

Objects that clients send say which members are needed and allow others where the server does.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

_STRING: Final[Schema] = {"type": "string"}
_BOOLEAN: Final[Schema] = {"type": "boolean"}
_INTEGER: Final[Schema] = {"type": "integer"}
DATATYPES: Final = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32",
    "FP64", "BYTES",
)  # fmt: skip


def reference(name: str) -> Schema:
    """A reference to one of the schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    members: Schema = {"type": "object", "properties": properties}
    return {**members, "required": list(required)} if required else members


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_TENSOR: Final = {
    "name": _STRING,
    "shape": _array(_INTEGER),
    "datatype": {"type": "string", "enum": list(DATATYPES)},
}
_DATA: Final[Schema] = {
    "type": "array",
    "description": "The elements in row-major order, flat or nested as the shape is. Absent where they are "
    "binary data or in shared memory. FP16 and BF16 have no JSON form.",
}

_OPTIONAL_NUMBER: Final[Schema] = {"type": ["number", "null"]}
_OPTIONAL_INTEGER: Final[Schema] = {"type": ["integer", "null"]}
_GPU: Final = _object(
    ("uuid", "device", "name", "state", "reason", "reading", "xid_errors", "models"),
    uuid=_STRING,
    device={**_STRING, "description": "cuda:0 and so on; empty where this server cannot use it."},
    name=_STRING,
    state={"type": "string", "enum": ["HEALTHY", "SUSPECT", "LOST"]},
    reason={**_STRING, "description": "Why it is lost."},
    reading={
        "type": ["object", "null"],
        "description": "null where the driver does not answer for it, or it is lost.",
        "properties": {
            "memory_total_bytes": _OPTIONAL_INTEGER,
            "memory_used_bytes": _OPTIONAL_INTEGER,
            "utilization": {**_OPTIONAL_NUMBER, "description": "0 to 1."},
            "temperature_celsius": _OPTIONAL_INTEGER,
            "power_watts": _OPTIONAL_NUMBER,
            "power_limit_watts": _OPTIONAL_NUMBER,
            "energy_joules": _OPTIONAL_NUMBER,
            "ecc_errors_corrected": _OPTIONAL_INTEGER,
            "ecc_errors_uncorrected": _OPTIONAL_INTEGER,
            "remapped_rows": {"type": ["object", "null"]},
            "retired_pages_pending": {"type": ["boolean", "null"]},
            "slowdowns": {"type": ["array", "null"], "items": _STRING},
        },
    },
    xid_errors={"type": "object", "additionalProperties": _INTEGER},
    models=_array(
        _object(("name", "version", "memory_bytes"), name=_STRING, version=_STRING, memory_bytes=_INTEGER)
    ),
)
_DURATION: Final = reference("StatisticDuration")
_DURATIONS: Final[Schema] = {"type": "object", "additionalProperties": _DURATION}
_STATISTICS: Final = _object(
    name=_STRING,
    version=_STRING,
    last_inference={**_INTEGER, "description": "Milliseconds since 1970."},
    inference_count=_INTEGER,
    execution_count=_INTEGER,
    inference_stats=_DURATIONS,
    batch_stats=_array(
        _object(
            batch_size=_INTEGER, compute_input=_DURATION, compute_infer=_DURATION, compute_output=_DURATION
        )
    ),
    memory_usage=_array(_object(type=_STRING, id=_INTEGER, byte_size=_INTEGER)),
    response_stats={
        "type": "object",
        "description": "Of decoupled models: by the index of a response in its stream.",
        "additionalProperties": _DURATIONS,
    },
)

SCHEMAS: Final[dict[str, Schema]] = {
    "OpenApi": {"type": "object", "description": "An OpenAPI document."},
    "Error": _object(("error",), error=_STRING),
    "Live": _object(("live",), live=_BOOLEAN),
    "Ready": _object(("ready",), ready=_BOOLEAN),
    "Started": _object(("started",), started=_BOOLEAN),
    "ServerMetadata": _object(
        ("name", "version", "extensions"), name=_STRING, version=_STRING, extensions=_array(_STRING)
    ),
    "TensorMetadata": {
        **_object(("name", "datatype", "shape"), **_TENSOR),
        "description": "A declared input or output; -1 in its shape stands for any size.",
    },
    "ModelMetadata": _object(
        ("name", "platform", "inputs", "outputs"),
        name=_STRING,
        versions=_array(_STRING),
        platform=_STRING,
        inputs=_array(reference("TensorMetadata")),
        outputs=_array(reference("TensorMetadata")),
    ),
    "ModelConfig": {
        "type": "object",
        "description": "The model's configuration, as a ModelConfig message of the protocol in JSON.",
        "required": ["name"],
        "properties": {"name": _STRING, "max_batch_size": _INTEGER},
    },
    "Parameters": {
        "type": "object",
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    },
    "InputTensor": _object(
        ("name", "shape", "datatype"), **_TENSOR, parameters=reference("Parameters"), data=_DATA
    ),
    "RequestedOutput": _object(("name",), name=_STRING, parameters=reference("Parameters")),
    "InferRequest": _object(
        ("inputs",),
        id=_STRING,
        parameters=reference("Parameters"),
        inputs=_array(reference("InputTensor")),
        outputs=_array(reference("RequestedOutput")),
    ),
    "OutputTensor": _object(
        ("name", "shape", "datatype"), **_TENSOR, parameters=reference("Parameters"), data=_DATA
    ),
    "InferResponse": _object(
        ("model_name", "model_version", "outputs"),
        model_name=_STRING,
        model_version=_STRING,
        id=_STRING,
        parameters=reference("Parameters"),
        outputs=_array(reference("OutputTensor")),
    ),
    "GenerateRequest": {
        "type": "object",
        "description": "A member with the name of an input is that input; 'id' is the request's; the members "
        "of 'parameters' and all others are parameters of the request.",
        "properties": {"id": _STRING, "parameters": {"type": "object"}},
    },
    "GenerateResponse": {
        **_object(("model_name", "model_version"), model_name=_STRING, model_version=_STRING, id=_STRING),
        "description": "Every output stands under its name, as one value where it has one element.",
    },
    "RepositoryLoadRequest": _object(
        parameters={
            "type": "object",
            "properties": {"config": {**_STRING, "description": "A configuration, as JSON in a string."}},
            "patternProperties": {"^file:": {**_STRING, "contentEncoding": "base64"}},
            "additionalProperties": False,
        }
    ),
    "RepositoryUnloadRequest": _object(parameters={"type": "object"}),
    "SystemRegions": _array(
        _object((), name=_STRING, key=_STRING, offset=_INTEGER, byte_size=_INTEGER),
    ),
    "SystemRegisterRequest": _object(
        ("key", "byte_size"),
        key={**_STRING, "description": "The name that shm_open takes."},
        offset=_INTEGER,
        byte_size=_INTEGER,
    ),
    "CudaRegions": _array(_object((), name=_STRING, device_id=_INTEGER, byte_size=_INTEGER)),
    "CudaRegisterRequest": _object(
        ("raw_handle", "device_id", "byte_size"),
        raw_handle=_object(
            ("b64",),
            b64={**_STRING, "contentEncoding": "base64", "description": "A cudaIpcMemHandle_t, 64 bytes."},
        ),
        device_id=_INTEGER,
        byte_size=_INTEGER,
    ),
    "StatisticDuration": {
        **_object(("count", "ns"), count=_INTEGER, ns=_INTEGER),
        "description": "How many times something happened, and how many nanoseconds it took in total.",
    },
    "ModelStatistics": _object(("model_stats",), model_stats=_array(_STATISTICS)),
    "Gpus": _object(
        ("stale", "age_seconds", "gpus"),
        stale={**_BOOLEAN, "description": "The driver has not answered lately."},
        age_seconds=_OPTIONAL_NUMBER,
        gpus=_array(_GPU),
    ),
    "RepositoryIndexRequest": _object(ready={**_BOOLEAN, "description": "Only models that are ready."}),
    "RepositoryIndex": _array(
        _object(
            ("name",),
            name=_STRING,
            version=_STRING,
            state={"type": "string", "enum": ["READY", "UNAVAILABLE", "LOADING", "UNLOADING", "UNKNOWN"]},
            reason=_STRING,
        )
    ),
    "TraceSettings": {
        **_object(
            (),
            trace_level=_array(_STRING),
            trace_rate=_STRING,
            trace_count=_STRING,
            log_frequency=_STRING,
            trace_file=_STRING,
            trace_mode=_STRING,
        ),
        "description": "In a request: what is to change. null takes a setting back.",
    },
    "LogSettings": {
        **_object(
            (),
            log_file=_STRING,
            log_info=_BOOLEAN,
            log_warning=_BOOLEAN,
            log_error=_BOOLEAN,
            log_verbose_level=_INTEGER,
            log_format=_STRING,
        ),
        "description": "In a request: what is to change; the file is not for clients to choose.",
    },
}
