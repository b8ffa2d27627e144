"""Config overrides of a load request: changes of the ``ModelSpec`` of each version of a model.

The changes are plain data with the names of Triton's ``ModelConfig``, from
``front/requests/config_override.py``.
They come from another process and are checked like all untrusted input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gpuserve.core.errors import BadModelConfig, Internal, InvalidArgument
from gpuserve.devices.placement import ANYWHERE
from gpuserve.model.build import batching_and_queue
from gpuserve.model.declaration import device_problem, input_memory
from gpuserve.model.options import checked, integer, rows
from gpuserve.model.rules import check_batching, check_ensemble, check_ragged, check_ranks
from gpuserve.model.spec import MAX_INSTANCES, ModelSpec, QueueSpec
from gpuserve_worker.protocol.tensor import BYTES, ITEMSIZE, TensorSpec


def changed(specs: Sequence[ModelSpec], changes: Mapping[str, Any]) -> Sequence[ModelSpec]:
    """Return a model's versions with changes; raise InvalidArgument, or Internal if none is left."""
    if not changes or not specs:
        return specs
    name = specs[0].name
    others = {key: value for key, value in changes.items() if key != "version_policy"}
    policy = changes.get("version_policy", {})
    try:
        kept = specs
        if "latest" in policy:
            newest = sorted(specs, key=lambda one: one.version, reverse=True)
            kept = newest[: integer("num_versions", policy["latest"], 1)]
        elif "specific" in policy:
            kept = [one for one in specs if one.version in policy["specific"]]
        done = [_changed(spec, others) for spec in kept]
    except (BadModelConfig, ValueError) as error:
        raise InvalidArgument(f"failed to load '{name}': {error}") from None
    except (TypeError, KeyError, AttributeError):
        text = f"failed to load '{name}': its config override has values that do not fit"
        raise InvalidArgument(text) from None
    if not done:
        raise Internal(f"failed to load '{name}', no version is available")
    return done


def _changed(spec: ModelSpec, changes: Mapping[str, Any]) -> ModelSpec:
    # Other values are checked against max_batch_size, so it comes first.
    for key in sorted(changes, key=lambda key: key != "max_batch_size"):
        if spec.is_ensemble and key not in _OF_ENSEMBLES:
            if changes[key]:
                raise BadModelConfig(f"it is an ensemble, which has no {key}")
        elif (change := _CHANGES.get(key)) is not None:
            spec = change(spec, changes[key])
        else:
            options = {one.name: one for one in rows(ModelSpec).values() if one.option.triton}
            spec = dataclasses.replace(spec, **{key: checked(options[key], changes[key], key)})
    if spec.is_ensemble:
        check_ensemble(spec)
    check_ragged(spec)
    check_ranks(spec)
    if problem := device_problem(spec.array, [one.device for one in spec.instances]):
        raise BadModelConfig(problem)
    if spec.decoupled:
        if spec.response_cache:
            raise BadModelConfig("response_cache does not go with decoupled")
        spec = dataclasses.replace(spec, retry_on_worker_death=False)
    sizes = spec.batching.preferred_batch_sizes
    if sizes and max(sizes) > spec.max_batch_size:
        raise BadModelConfig(f"dynamic batching preferred size must be <= max batch size for {spec.name}")
    return spec


def _inputs(spec: ModelSpec, value: Any) -> ModelSpec:
    """Replace inputs by (name, datatype, shape, optional, ragged); known ones keep their memory."""
    before = {one.name: one.memory for one in spec.inputs}
    inputs = tuple(
        one
        if one.datatype == BYTES
        else one._replace(memory=input_memory(before.get(one.name), one.datatype, spec.array))
        for one in _tensors(value)
    )
    return dataclasses.replace(spec, inputs=inputs)


def _tensors(value: Sequence[Any]) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    for name, datatype, shape, optional, ragged in value:
        if not name or any(name == earlier.name for earlier in specs):
            raise BadModelConfig(f"a tensor without a name, or two of the name {name!r}")
        if datatype not in ITEMSIZE:
            raise BadModelConfig(f"tensor {name!r} needs a data_type")
        if any(dim < -1 for dim in shape):
            raise BadModelConfig(f"tensor {name!r}: dims must be at least 0, or -1 for any size")
        specs.append(TensorSpec(str(name), str(datatype), tuple(shape), bool(optional), ragged=bool(ragged)))
    return tuple(specs)


def _dynamic_batching(spec: ModelSpec, value: Mapping[str, Any]) -> ModelSpec:
    batching, queue_options = batching_and_queue(value)
    own = {
        row.name: getattr(spec.queue, row.name) for row in rows(QueueSpec).values() if not row.option.triton
    }
    queue = dataclasses.replace(queue_options, **own)
    check_batching(spec.max_batch_size or None, batching, queue, in_tritons_names=True)
    return dataclasses.replace(spec, batching=batching, queue=queue)


def _instance_groups(spec: ModelSpec, value: Sequence[Any]) -> ModelSpec:
    """Replace instances by groups of (count, devices); without devices the model's are used."""
    devices: list[str] = []
    present = list(dict.fromkeys(one.device for one in spec.instances))
    for count, named in value:
        for device in named or present:
            if len(devices) + integer("count", count, 1) > MAX_INSTANCES:
                raise BadModelConfig(f"a model may have {MAX_INSTANCES} instances at most")
            devices += [device] * count
    if len(devices) == len(spec.instances):
        alike = list(spec.instances)
    elif all(one.source == spec.instances[0].source for one in spec.instances):
        alike = [spec.instances[0]] * len(devices)
    else:
        raise BadModelConfig(
            f"the {len(spec.instances)} instances have different callables: there cannot be {len(devices)}"
        )
    instances = []
    for index, (device, one) in enumerate(zip(devices, alike, strict=True)):  # named as in a config file
        name = f"{device}#{devices[:index].count(device)}"
        instances.append(dataclasses.replace(one, name=name, device=device, placement=ANYWHERE))
    return dataclasses.replace(spec, instances=tuple(instances)) if devices else spec


_CHANGES: Final[dict[str, Callable[[ModelSpec, Any], ModelSpec]]] = {
    "input": _inputs,
    "output": lambda spec, value: dataclasses.replace(spec, outputs=_tensors(value)),
    "dynamic_batching": _dynamic_batching,
    "instance_group": _instance_groups,
}
#: All other changes concern workers.
_OF_ENSEMBLES: Final = frozenset({"max_batch_size", "input", "output"})
