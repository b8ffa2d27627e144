"""``ClientModelConfig``: a model's configuration as clients see it, parsed from a server's answer."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuserve.model.declaration import DynamicBatcher, ModelWarmup, QueuePolicy, TimeoutAction
from gpuserve_worker.protocol.tensor import BYTES, datatype_of, numpy_dtype

BACKEND = "python"


class DeviceKind(enum.Enum):
    """The kind of device of an instance."""

    KIND_AUTO = "KIND_AUTO"
    KIND_CPU = "KIND_CPU"
    KIND_GPU = "KIND_GPU"


@dataclass(frozen=True)
class TensorSpec:
    """An input or output. ``shape`` has no batch axis if the model batches; -1 is any size."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    optional: bool | None = False


@dataclass(frozen=True)
class ResponseCache:
    """A switch: ``enable`` if the server caches the responses to equal requests."""

    enable: bool


@dataclass(frozen=True)
class ClientModelConfig:
    """A model's configuration. ``batcher`` is None if requests are not merged. ``instance_group`` is the
    number of instances for each kind of device.
    """

    model_name: str
    model_version: int = 1
    max_batch_size: int = 4
    batching: bool = True
    batcher: DynamicBatcher | None = None
    instance_group: Mapping[DeviceKind, int | None] = field(default_factory=dict)
    decoupled: bool = False
    backend_parameters: Mapping[str, str] = field(default_factory=dict)
    inputs: Sequence[TensorSpec] | None = None
    outputs: Sequence[TensorSpec] | None = None
    response_cache: ResponseCache | None = None
    model_warmup: Sequence[ModelWarmup] | None = None
    backend: str = BACKEND


def parse_model_config(document: Mapping[str, Any], model_version: str = "") -> ClientModelConfig:
    """Parse a server's JSON with the names of protobuf's fields.

    64-bit integers may be strings, and members with default values may be missing, as in protobuf's own JSON.
    ``model_version`` is the requested version, for servers that do not return the version.
    """
    max_batch_size = int(document.get("max_batch_size", 0))
    versions = document.get("version_policy", {}).get("specific", {}).get("versions", ())
    cache = document.get("response_cache")
    batching = document.get("dynamic_batching")
    return ClientModelConfig(
        model_name=document["name"],
        model_version=int(model_version) if model_version else max(map(int, versions), default=1),
        max_batch_size=max_batch_size,
        batching=max_batch_size > 0,
        batcher=None if batching is None else _batcher(batching),
        instance_group=_instances(document.get("instance_group", ())),
        decoupled=bool(document.get("model_transaction_policy", {}).get("decoupled", False)),
        backend_parameters={
            key: value.get("string_value", "") for key, value in document.get("parameters", {}).items()
        },
        inputs=[_tensor_spec(one) for one in document.get("input", ())],
        outputs=[_tensor_spec(one) for one in document.get("output", ())],
        response_cache=None if cache is None else ResponseCache(bool(cache.get("enable", False))),
        backend=document.get("backend") or BACKEND,
    )


def _tensor_spec(document: Mapping[str, Any]) -> TensorSpec:
    shape = tuple(map(int, document.get("dims", ())))
    dtype = _numpy_type(document["data_type"])
    return TensorSpec(document["name"], shape, dtype, bool(document.get("optional", False)))


def _numpy_type(data_type: str) -> Any:
    import numpy as np

    datatype = datatype_of(data_type)
    if datatype == BYTES:
        return np.bytes_
    return bool if datatype == "BOOL" else numpy_dtype(datatype).type


def _instances(groups: Sequence[Mapping[str, Any]]) -> dict[DeviceKind, int | None]:
    counts: dict[DeviceKind, int | None] = {}
    for group in groups:
        kind = DeviceKind(group.get("kind", "KIND_AUTO"))
        counts[kind] = (counts.get(kind) or 0) + int(group.get("count", 1))
    return counts


def _batcher(document: Mapping[str, Any]) -> DynamicBatcher:
    default = document.get("default_queue_policy")
    policies = document.get("priority_queue_policy", {})
    return DynamicBatcher(
        max_queue_delay_microseconds=int(document.get("max_queue_delay_microseconds", 0)),
        preferred_batch_size=[int(size) for size in document.get("preferred_batch_size", ())] or None,
        preserve_ordering=bool(document.get("preserve_ordering", False)),
        priority_levels=int(document.get("priority_levels", 0)),
        default_priority_level=int(document.get("default_priority_level", 0)),
        default_queue_policy=None if default is None else _queue_policy(default),
        priority_queue_policy={int(level): _queue_policy(one) for level, one in policies.items()} or None,
    )


def _queue_policy(document: Mapping[str, Any]) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=TimeoutAction(document.get("timeout_action", "REJECT")),
        default_timeout_microseconds=int(document.get("default_timeout_microseconds", 0)),
        allow_timeout_override=bool(document.get("allow_timeout_override", False)),
        max_queue_size=int(document.get("max_queue_size", 0)),
    )
