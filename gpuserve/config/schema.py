"""What a config file may say: one class a mapping, one field a key, with its default and its
description. ``gpuserve schema`` prints the JSON Schema of these classes, the flags of ``gpuserve
serve`` are made from ``ServerEntry``, and the names of environment variables follow from the keys.

A field checks itself here; what concerns several fields is in ``rules``. No file, no environment.
"""

from __future__ import annotations

import re
import types
import typing
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gpuserve.config.positions import Path
from gpuserve.errors import BindError
from gpuserve.settings import ServerSettings
from gpuserve.spec import DEFAULT_MAX_QUEUE_NBYTES, DEFAULT_MAX_QUEUE_REQUESTS, check_model_name
from gpuserve_worker.tensor import ITEMSIZE, datatype_of

MAX_INSTANCES = 256
_CALLABLE = re.compile(
    r"(?P<place>[^:]+\.py|[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)"
)
_DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d{0,3})")
_MSGPACK_INTEGERS = range(-(2**63), 2**64)
#: The words offered when a dtype is misspelt.
DTYPE_WORDS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "bytes"),
    *ITEMSIZE,
)

_DEFAULTS = ServerSettings()


def _model_name(name: str) -> str:
    try:
        return check_model_name(name)
    except BindError as error:
        raise ValueError(str(error)) from None


def _callable_path(path: str) -> str:
    if _CALLABLE.fullmatch(path) is None:
        raise ValueError(f"expected 'file.py:attribute' or 'package.module:attribute', given {path!r}")
    return path


def _device(device: str) -> str:
    if _DEVICE.fullmatch(device) is None:
        raise ValueError(f"expected 'cpu' or 'cuda:0', 'cuda:1', …, given {device!r}")
    return device


def _dtype(dtype: str) -> str:
    try:
        datatype_of(dtype)
    except (ValueError, SyntaxError):
        raise ValueError(
            f"expected a dtype such as 'float32', 'FP32' or 'bytes', given {dtype!r}"
            f"{nearest(dtype, DTYPE_WORDS)}"
        ) from None
    return dtype


def _plain(value: Any) -> Any:
    """Callable arguments travel to a worker as msgpack: the types of YAML, and integers of 64 bits."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, int) and value not in _MSGPACK_INTEGERS:
        raise ValueError(f"expected integers of at most 64 bits, given {value}")
    return value


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """``; did you mean '…'?`` with the known word most like this one, "" where none is."""
    import difflib

    folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def _header_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"expected a regular expression, given {pattern!r}: {error}") from None
    return pattern


Port = Annotated[int, Field(ge=0, le=65535)]
HeaderPattern = Annotated[str, AfterValidator(_header_pattern)]
EndpointGroup = Literal[
    "health",
    "inference",
    "logging",
    "metadata",
    "model-config",
    "model-repository",
    "shared-memory",
    "statistics",
    "trace",
]
Dimension = Annotated[int, Field(ge=-1)]


class Entry(BaseModel):
    """A mapping of the file: unknown keys are errors, and no type is coerced into another."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class ServerEntry(Entry):
    """The server as a whole."""

    host: str = Field(default=_DEFAULTS.host, min_length=1, description="Address to listen on.")
    http_port: Port | None = Field(
        default=_DEFAULTS.http_port, description="Port of HTTP; 0 picks a free one, null switches it off."
    )
    grpc_port: Port | None = Field(
        default=_DEFAULTS.grpc_port, description="Port of gRPC; 0 picks a free one, null switches it off."
    )
    metrics_port: Port | None = Field(
        default=_DEFAULTS.metrics_port,
        description="Port of /metrics; 0 picks a free one, null switches it off.",
    )
    transport: Literal["h2corn", "grpcio"] = Field(
        default=_DEFAULTS.transport,  # type: ignore[arg-type]  # the default is one of the two words
        description="h2corn serves both protocols on both ports; with grpcio, grpc.aio has the gRPC port.",
    )
    name: str = Field(
        default=_DEFAULTS.name, min_length=1, description="What the server's metadata gives as its name."
    )
    drain_timeout_s: float = Field(
        default=_DEFAULTS.drain_timeout_s,
        ge=0,
        description="Seconds that queued requests have after SIGTERM.",
    )
    load_timeout_s: float = Field(
        default=_DEFAULTS.load_timeout_s,
        ge=0,
        description="Seconds that a model may take to load; 0 is no limit.",
    )
    max_request_nbytes: int = Field(
        default=_DEFAULTS.max_request_nbytes, gt=0, description="Largest request that is accepted, in bytes."
    )
    max_arena_nbytes: int = Field(
        default=_DEFAULTS.max_arena_nbytes,
        gt=0,
        description="Shared memory that a model's inputs may take, in bytes.",
    )
    response_cache_nbytes: int = Field(
        default=_DEFAULTS.response_cache_nbytes,
        ge=0,
        description="Memory for the answers of models with response_cache, in bytes; 0 switches it off.",
    )
    http_header_forward_pattern: HeaderPattern = Field(
        default=_DEFAULTS.http_header_forward_pattern,
        description="HTTP headers that this regular expression is found in reach Request.parameters.",
    )
    grpc_header_forward_pattern: HeaderPattern = Field(
        default=_DEFAULTS.grpc_header_forward_pattern,
        description="gRPC metadata that this regular expression is found in reach Request.parameters.",
    )
    restricted_endpoints: tuple[EndpointGroup, ...] = Field(
        default=_DEFAULTS.restricted_endpoints,  # type: ignore[arg-type]  # the default is empty
        strict=False,
        description="Groups of endpoints that need access_token in the header triton-access-token.",
    )
    access_token: Annotated[str, Field(min_length=1)] | None = Field(
        default=_DEFAULTS.access_token, description="The token for the restricted endpoints."
    )
    attachable: bool = Field(
        default=_DEFAULTS.attachable,
        description="Whether other programs of this user on this machine may serve models through it.",
    )
    log_format: Literal["text", "json"] = Field(
        default=_DEFAULTS.log_format,  # type: ignore[arg-type]  # as above
        description="Form of the log lines, output of the models included.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default=_DEFAULTS.log_level,  # type: ignore[arg-type]  # as above
        description="Least severe level that is logged.",
    )


class OutputEntry(Entry):
    """A tensor that the model answers with."""

    name: str = Field(min_length=1, description="Name of the tensor.")
    dtype: Annotated[str, AfterValidator(_dtype)] = Field(
        description='A numpy name (float32), a v2 name (FP32), or "bytes".',
        examples=["float32", "FP32", "bytes"],
    )
    shape: list[Dimension] = Field(
        description="Shape without the batch axis where the model batches; -1 is any size.", examples=[[-1]]
    )


class InputEntry(OutputEntry):
    """A tensor that a request brings."""

    optional: bool = Field(default=False, description="Whether a request may leave this input out.")


class InstanceEntry(Entry):
    """Worker processes on one device."""

    device: Annotated[str, AfterValidator(_device)] = Field(
        default="cpu", description="cpu, or cuda:0, cuda:1, …", examples=["cpu", "cuda:0"]
    )
    count: int = Field(default=1, ge=1, le=MAX_INSTANCES, description="How many processes on this device.")


class BatchingEntry(Entry):
    """When a batch is formed."""

    max_queue_delay_us: int = Field(
        default=0, ge=0, description="Microseconds that a request may wait for others to fill a batch."
    )
    preferred_batch_sizes: list[Annotated[int, Field(gt=0)]] = Field(
        default_factory=list, description="Batch sizes to wait for; each at most max_batch_size."
    )


class QueueEntry(Entry):
    """How much may wait for a model before requests are refused."""

    max_requests: int = Field(default=DEFAULT_MAX_QUEUE_REQUESTS, ge=1, description="Requests that may wait.")
    max_nbytes: int = Field(
        default=DEFAULT_MAX_QUEUE_NBYTES, ge=1, description="Bytes of tensors that may wait."
    )


class ModelEntry(Entry):
    """One model."""

    name: Annotated[str, AfterValidator(_model_name)] = Field(
        description="Name in requests: letters, digits, dots, underscores and dashes, at most 128."
    )
    callable: Annotated[str, AfterValidator(_callable_path)] = Field(
        description="Inference callable: file.py:attribute, beside this file, or package.module:attribute.",
        examples=["linear.py:Linear"],
    )
    kwargs: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default_factory=dict, description="Arguments when the attribute is a class or a factory."
    )
    instances: list[InstanceEntry] = Field(
        default_factory=lambda: [InstanceEntry()],
        min_length=1,
        description="Where the model runs: one worker process each.",
    )
    inputs: list[InputEntry] = Field(min_length=1, description="Tensors of a request.")
    outputs: list[OutputEntry] = Field(min_length=1, description="Tensors of a response.")
    max_batch_size: int = Field(
        default=0, ge=0, description="Largest batch; 0: the model does not batch and its shapes are complete."
    )
    batching: BatchingEntry = Field(default_factory=BatchingEntry, description="How requests are merged.")
    queue: QueueEntry = Field(default_factory=QueueEntry, description="How much may wait.")
    prefetch: Annotated[int, Field(ge=0, le=16)] | None = Field(
        default=None, description="Batches that wait inside a worker; null: 1 on a GPU, 0 on the CPU."
    )
    strict: bool = Field(default=False, description="Check the outputs against their declaration.")
    read_only_inputs: bool = Field(default=False, description="The callable never writes to its inputs.")
    retry_on_worker_death: bool = Field(
        default=True, description="Run a batch once more when the worker that had it died."
    )
    version: int = Field(default=1, ge=1, description="Version in requests.")


class ConfigFile(Entry):
    """A whole file: the server, and the models it serves."""

    server: ServerEntry = Field(default_factory=ServerEntry, description="What does not depend on a model.")
    models: list[ModelEntry] = Field(min_length=1, description="The models to serve.")


def annotation_at(path: Path) -> Any:
    """The type of the value at a path, without null; None where the schema has no such path."""
    annotation: Any = ConfigFile
    for step in path:
        annotation = _member(annotation, step)
    return annotation


def keys_at(path: Path) -> tuple[str, ...]:
    """The keys that the mapping at a path may have; empty where it is none or takes any key."""
    annotation = annotation_at(path)
    return tuple(annotation.model_fields) if _is_entry(annotation) else ()


def split_callable(path: str) -> tuple[str, str]:
    """``linear.py:Linear`` as ("linear.py", "Linear").

    Raises:
        ValueError: the path has neither form.
    """
    found = _CALLABLE.fullmatch(_callable_path(path))
    assert found is not None
    return found["place"], found["name"]


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **ConfigFile.model_json_schema()}


def _is_entry(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Entry)


def _member(annotation: Any, step: str | int) -> Any:
    origin = typing.get_origin(annotation)
    if origin is dict:
        return Any
    if annotation is Any:
        return Any
    if origin is list and isinstance(step, int):
        return _bare(typing.get_args(annotation)[0])
    if _is_entry(annotation) and step in annotation.model_fields:
        return _bare(annotation.model_fields[step].annotation)
    return None


def _bare(annotation: Any) -> Any:
    """A type without ``Annotated`` and without ``| None``."""
    if typing.get_origin(annotation) is Annotated:
        return _bare(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in {types.UnionType, typing.Union}:
        return _bare(next(one for one in typing.get_args(annotation) if one is not type(None)))
    return annotation
