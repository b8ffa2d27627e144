"""``ClientModelConfig``: a model's configuration as clients see it, parsed from a server's answer."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, TypeVar

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
    """Parse a server's JSON by protobuf's rules: integers may be strings, defaults may be missing.
    ``model_version`` is the requested version, for servers that do not return the version.
    """
    instances: Counter[DeviceKind] = Counter()
    for group in document.get("instance_group", ()):
        instances[DeviceKind(group.get("kind", "KIND_AUTO"))] += int(group.get("count", 1))
    max_batch_size = int(document.get("max_batch_size", 0))
    versions = document.get("version_policy", {}).get("specific", {}).get("versions", ())
    cache = document.get("response_cache")
    batching = document.get("dynamic_batching")
    return ClientModelConfig(
        model_name=document["name"],
        model_version=int(model_version) if model_version else max(map(int, versions), default=1),
        max_batch_size=max_batch_size,
        batching=max_batch_size > 0,
        batcher=None if batching is None else _options(DynamicBatcher, batching),
        instance_group=dict(instances),
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
    datatype = datatype_of(document["data_type"])
    dtype: Any = bool
    if datatype == BYTES:
        import numpy as np

        dtype = np.bytes_
    elif datatype != "BOOL":
        dtype = numpy_dtype(datatype).type
    return TensorSpec(document["name"], shape, dtype, bool(document.get("optional", False)))


_Options = TypeVar("_Options", DynamicBatcher, QueuePolicy)


def _options(table: type[_Options], document: Mapping[str, Any]) -> _Options:
    known = document.keys() & {one.name for one in fields(table)}
    return table(**{name: _READERS.get(name, int)(document[name]) for name in known})


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "preferred_batch_size": lambda sizes: [int(one) for one in sizes] or None,
    "preserve_ordering": bool,
    "default_queue_policy": partial(_options, QueuePolicy),
    "priority_queue_policy": lambda policies: (
        {int(level): _options(QueuePolicy, one) for level, one in policies.items()} or None
    ),
    "timeout_action": TimeoutAction,
    "allow_timeout_override": bool,
}
