"""The ``config`` of a load request: JSON of Triton's ``ModelConfig``, by protobuf's rules, converted into the
changes that ``spec_changes`` applies. Pure.

Only members in the text are changed. A member without effect (empty, or equal to the model's) is accepted
whatever it is; any other member that this server does not support is refused by name.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from google.protobuf import json_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.core.errors import InvalidArgument
from gpuserve.devices.names import CPU, EVERY_GPU, TOGETHER, gpu_name
from gpuserve.front.requests.limits import shown
from gpuserve.model.options import rows
from gpuserve.model.spec import BatchingSpec, ModelSpec, QueueSpec
from gpuserve.model.triton_config import BACKEND, datatype, model_config, options_of

_MAX_DEPTH: Final = 50
_MAX_DETAIL: Final = 200
_Reader = Callable[[str, Any], Any]


class BadOverride(ValueError):
    """An override's text that is no JSON of a ``ModelConfig``."""


def read_override(model: str, text: str, served: Sequence[ModelSpec]) -> dict[str, Any]:
    """Return the changes in a text. Raises BadOverride if malformed, InvalidArgument if not changeable."""
    config, given = _parse(text)
    now = model_config(served[-1], [one.version for one in served]) if served else pb.ModelConfig()
    changes: dict[str, Any] = {}
    for field in pb.ModelConfig.DESCRIPTOR.fields:
        if field.name not in given:
            continue
        if field.name in _CHECKS:
            if getattr(config, field.name) != getattr(now, field.name):
                _CHECKS[field.name](model, config)
        elif field.name in _READERS:
            _check_parts(model, config, now, field.name)
            key, read = _READERS[field.name]
            if field.name not in _PARTS or getattr(config, field.name):  # an empty list changes nothing
                changes[key] = read(model, config)
        elif not _is_without_effect(config, now, field.name):
            raise _not_changed(model, field.name)
    if config.version_policy == now.version_policy:
        changes.pop("version_policy", None)
    return changes


def _not_changed(model: str, field: str) -> InvalidArgument:
    return InvalidArgument(
        f"failed to load '{shown(model)}': its config override sets '{field}', which cannot be changed by a "
        "load request of this server"
    )


def _parse(text: str) -> tuple[Any, set[str]]:
    try:
        document = json.loads(text)
        config = json_format.Parse(text, pb.ModelConfig(), max_recursion_depth=_MAX_DEPTH)
    except (json_format.ParseError, ValueError, RecursionError) as error:
        detail = " ".join(str(error).split()) or "it nests too deeply"
        raise BadOverride(detail[:_MAX_DETAIL]) from None
    if not isinstance(document, dict):
        raise BadOverride("it is no JSON object")
    # JSON may use the camel-case names of fields.
    names = {one.camelcase_name: one.name for one in pb.ModelConfig.DESCRIPTOR.fields}
    return config, {str(names.get(key, key)) for key, value in document.items() if value is not None}


def _is_without_effect(config: Any, now: Any, field: str) -> bool:
    """Return whether a field equals the model's, or is empty, which has no meaning except in a oneof."""
    value = getattr(config, field)
    if pb.ModelConfig.DESCRIPTOR.fields_by_name[field].containing_oneof is not None:
        return bool(now.HasField(field) and value == getattr(now, field))
    return any(value == getattr(other, field) for other in (now, pb.ModelConfig()))


def _check_parts(model: str, config: Any, now: Any, field: str) -> None:
    """Raise InvalidArgument if an unsupported part of a field differs from the model's."""
    known = _PARTS.get(field)
    if known is None or _is_without_effect(config, now, field):
        return
    for one in getattr(config, field):
        for part, _ in one.ListFields():
            if part.name not in known:
                raise _not_changed(model, f"{field}.{part.name}")


def _inputs(model: str, config: Any) -> list[tuple[str, str, tuple[int, ...], bool, bool]]:
    return [
        (one.name, datatype(one.data_type), tuple(one.dims), one.optional, one.allow_ragged_batch)
        for one in config.input
    ]


def _outputs(model: str, config: Any) -> list[tuple[str, str, tuple[int, ...], bool, bool]]:
    return [(one.name, datatype(one.data_type), tuple(one.dims), False, False) for one in config.output]


def _version_policy(model: str, config: Any) -> dict[str, Any]:
    match config.version_policy.WhichOneof("policy_choice"):
        case "latest":
            return {"latest": config.version_policy.latest.num_versions or 1}
        case "specific":
            return {"specific": list(config.version_policy.specific.versions)}
    return {}


def _dynamic_batching(model: str, config: Any) -> dict[str, Any]:
    given = config.dynamic_batching
    return options_of(given, BatchingSpec) | options_of(given, QueueSpec)


def _instance_groups(model: str, config: Any) -> list[tuple[int, tuple[str, ...]]]:
    return [(one.count or 1, _devices(model, one)) for one in config.instance_group]


def _devices(model: str, group: Any) -> tuple[str, ...]:
    """Return the devices that a group names, or none for the model's own devices."""
    kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
    if kind == "KIND_CPU" and group.gpus:
        raise InvalidArgument(
            f"instance group {shown(group.name)} of model {shown(model)} has kind KIND_CPU but specifies "
            "one or more GPUs"
        )
    if kind == "KIND_MODEL" and group.gpus:
        return (TOGETHER.join(gpu_name(one) for one in group.gpus),)
    if kind == "KIND_MODEL":
        raise InvalidArgument(
            f"failed to load '{shown(model)}': an instance_group of kind {kind} needs its GPUs named by gpus"
        )
    if kind == "KIND_CPU":
        return (CPU,)
    if kind == "KIND_GPU" and not group.gpus:
        return (EVERY_GPU,)
    return tuple(map(gpu_name, group.gpus))


def _name(model: str, config: Any) -> None:
    if config.name not in ("", model):
        raise InvalidArgument(
            f"failed to load '{shown(model)}': its config override has the name '{shown(config.name)}'"
        )


def _backend(model: str, config: Any) -> None:
    for given in (config.backend, config.platform):
        if given not in ("", BACKEND):
            raise InvalidArgument(
                f"failed to load '{shown(model)}': its config override has the backend '{shown(given)}', "
                f"but its callable is of backend '{BACKEND}'"
            )


def _plain(path: str, model: str, config: Any) -> Any:
    return operator.attrgetter(path)(config)


#: Field -> the key that it changes, and its reader.
_READERS: Final[dict[str, tuple[str, _Reader]]] = {
    "input": ("input", _inputs),
    "output": ("output", _outputs),
    "version_policy": ("version_policy", _version_policy),
    "dynamic_batching": ("dynamic_batching", _dynamic_batching),
    "instance_group": ("instance_group", _instance_groups),
    # The plain options of a model that Triton has too.
    **{
        row.option.triton.partition(".")[0]: (name, partial(_plain, row.option.triton))
        for name, row in rows(ModelSpec).items()
        if row.option.triton
    },
}
#: Field -> the parts of its elements that are read; of other fields all parts are.
_PARTS: Final = {
    "input": {"name", "data_type", "dims", "optional", "allow_ragged_batch"},
    "output": {"name", "data_type", "dims"},
    "instance_group": {"name", "count", "kind", "gpus"},
}
#: Fields that are only checked.
_CHECKS: Final[dict[str, _Reader]] = {"name": _name, "backend": _backend, "platform": _backend}
