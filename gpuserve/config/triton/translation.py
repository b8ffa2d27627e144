"""From a model folder to the entries of a config file that stand for it, one entry for each version, so that
the rules of config files (schema, rules, ``ModelSpec``) apply to model folders as well. No file is read here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.backends.sequences import iterative_slots
from gpuserve.config.triton.backends import (
    ENSEMBLE,
    Backend,
    UnknownBackend,
    backend_name,
    callable_of,
    normalized,
    triton_backend_of,
)
from gpuserve.config.triton.folders import CONFIG, ModelFolder, versions_served
from gpuserve.config.triton.pbtxt import EntryDraft, Pbtxt, Treatment, findings, listed
from gpuserve.config.yaml_document import Path
from gpuserve.devices.names import CPU, EVERY_GPU, TOGETHER, gpu_name
from gpuserve.model.spec import CORRID, DIRECT, OLDEST, BatchingSpec, QueueSpec, SequenceBatching
from gpuserve.model.triton_config import LATEST, datatype, options_of, plain

_KIND: Final = pb.ModelInstanceGroup.Kind


def place_instances(draft: EntryDraft, has_gpu: Callable[[], bool]) -> None:
    """Write the instances. Without an instance group there is one on each GPU, or else on the CPU."""
    groups = list(draft.message.instance_group)
    if not groups:
        draft.set_value("instances", [{"device": EVERY_GPU if has_gpu() else CPU}])
        return
    instances: list[dict[str, Any]] = []
    if all(group.passive for group in groups):
        text = "all instances are passive, so none runs requests; expected a group that is not"
        draft.add_fault(("instance_group",), text)
    for number, group in enumerate(groups):
        origin: Path = ("instance_group", number)
        if group.passive:
            draft.add_note((*origin, "passive"), "passive instances run no requests, so there are none here")
            continue
        for place, device in enumerate(_devices(draft, group, origin, has_gpu)):
            into: Path = ("instances", len(instances))
            draft.record_origin(into, origin)
            device_origin = (*origin, "gpus", place) if group.gpus else (*origin, "kind")
            draft.record_origin((*into, "device"), device_origin)
            entry: dict[str, Any] = {"device": device, "count": group.count or 1}
            if group.HasField("rate_limiter"):
                limiter = group.rate_limiter
                entry["rate_limiter"] = {
                    "priority": limiter.priority,
                    "resources": [
                        {"name": one.name, "count": one.count or 1, "shared": getattr(one, "global")}
                        for one in limiter.resources
                    ],
                }
            instances.append(entry)
    draft.set_value("instances", instances, "instance_group")


def _devices(draft: EntryDraft, group: Any, origin: Path, has_gpu: Callable[[], bool]) -> list[str]:
    kind = _KIND.Name(group.kind)
    if kind == "KIND_MODEL" and group.gpus:
        return [TOGETHER.join(gpu_name(one) for one in group.gpus)]
    if kind in {"KIND_CPU", "KIND_MODEL"}:  # a model without gpus finds all GPUs in its process
        if group.gpus:
            draft.add_fault((*origin, "gpus"), f"gpus do not go with {kind}; expected KIND_GPU, or no gpus")
        return [CPU]
    if kind == "KIND_AUTO" and not has_gpu():
        return [CPU]
    return [gpu_name(one) for one in group.gpus] or [EVERY_GPU]


#: The folder of a model with the files of its warm-ups.
_FOLDER: Final = "warmup"


def warm_up(draft: EntryDraft, folder: ModelFolder) -> None:
    config, warmups = draft.message, []
    for number, one in enumerate(config.model_warmup):
        origin = ("model_warmup", number)
        if config.max_batch_size == 0 and draft.pbtxt.has("max_batch_size") and one.batch_size > 1:
            text = f"expected batch_size 1 for a model that does not batch, given {one.batch_size}"
            draft.add_fault((*origin, "batch_size"), text)
        if missing := [
            each.name for each in config.input if not each.optional and each.name not in one.inputs
        ]:
            draft.add_fault(origin, f"the warm-up lacks inputs of the model: {listed(missing)}")
        inputs = {
            name: _warmup_input(draft, given, (*origin, "inputs", name), folder)
            for name, given in sorted(one.inputs.items())
        }
        about = {"name": one.name or f"warmup {number}", "batch_size": one.batch_size or 1}
        warmups.append({**about, "inputs": inputs, "count": one.count or 1})
    if warmups:
        draft.set_value("warmup", warmups, "model_warmup")


def _warmup_input(draft: EntryDraft, given: Any, origin: Path, folder: ModelFolder) -> dict[str, Any]:
    entry: dict[str, Any] = {"shape": list(given.dims)}
    if given.data_type == pb.TYPE_INVALID:
        draft.add_fault(
            origin, "the input of the warm-up has no data_type; expected that of the model's input"
        )
    else:
        entry["dtype"] = datatype(given.data_type)
    match given.WhichOneof("input_data_type"):
        case "zero_data":
            entry["values"] = "zero"
        case "random_data":
            entry["values"] = "random"
        case "input_data_file":
            entry["file"] = os.path.join(os.path.abspath(folder.path), _FOLDER, given.input_data_file)
        case _:
            draft.add_fault(origin, "expected zero_data: true, random_data: true or input_data_file")
    return entry


#: Fields of sequence batching that say when a batch is formed, or when a sequence ends without a request.
_WITHOUT_ITERATIONS: Final = (
    ("max_sequence_idle_microseconds",),
    *(("direct", field) for field in ("max_queue_delay_microseconds", "minimum_slot_utilization")),
    *(
        ("oldest", field)
        for field in ("preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering")
    ),
)
_FLAGS: Final = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}


def schedule(draft: EntryDraft) -> None:
    """Write the options of the model's scheduler, or the default of a model without one."""
    match draft.message.WhichOneof("scheduling_choice"):
        case "dynamic_batching":
            _dynamic(draft)
        case "sequence_batching":
            _sequences(draft)
        case "ensemble_scheduling":
            steps = [
                {
                    "model": one.model_name,
                    "inputs": dict(sorted(one.input_map.items())),
                    "outputs": dict(sorted(one.output_map.items())),
                    **({} if one.model_version in {LATEST, 0} else {"version": one.model_version}),
                }
                for one in draft.message.ensemble_scheduling.step
            ]
            draft.set_value("ensemble", {"steps": steps}, "ensemble_scheduling")
            draft.record_origin(("ensemble", "steps"), ("ensemble_scheduling", "step"))
        case _:
            if "max_batch_size" in draft.entry and draft.message.max_batch_size > 0:
                draft.set_value("batching", {"merge": False}, "max_batch_size")


def _dynamic(draft: EntryDraft) -> None:
    origin: Path = ("dynamic_batching",)
    given = draft.message.dynamic_batching
    if not given.priority_levels:
        for field in ("priority_queue_policy", "default_priority_level"):
            if draft.pbtxt.has(*origin, field):
                given.ClearField(field)
                draft.add_note((*origin, field), f"{field} has no effect without priority_levels")
    for key, table in (("batching", BatchingSpec), ("queue", QueueSpec)):
        draft.set_value(key, options_of(given, table), *origin)
    _without_batches(draft, origin)


def _without_batches(draft: EntryDraft, origin: Path) -> None:
    """Leave out the batching options of a model that does not batch."""
    if draft.message.max_batch_size == 0 and "max_batch_size" in draft.entry:
        if draft.entry["batching"].pop("preferred_batch_sizes", None):
            text = "expected no preferred_batch_size, because max_batch_size is 0"
            draft.add_fault((*origin, "preferred_batch_size"), text)
        if draft.entry["batching"].pop("max_queue_delay_us", None):
            draft.add_note(origin, f"{origin[0]} merges nothing, because max_batch_size is 0")


def _sequences(draft: EntryDraft) -> None:
    given, origin = draft.message.sequence_batching, ("sequence_batching",)
    controls = [
        _control(draft, one, (*origin, "control_input", number), number)
        for number, one in enumerate(given.control_input)
    ]
    if slots := iterative_slots(plain(draft.message)):
        _iterate(draft, slots, [one["kind"] for one in controls])
        return
    strategy = given.WhichOneof("strategy_choice") or DIRECT
    sequence = {**options_of(given, SequenceBatching), "strategy": strategy, "controls": controls}
    chosen = getattr(given, strategy)
    key = "max_candidate_sequences" if strategy == OLDEST else "minimum_slot_utilization"
    if getattr(chosen, key):
        sequence[key] = _rounded(getattr(chosen, key))
        draft.record_origin((*origin, key), (*origin, strategy, key))
    draft.set_value("sequence_batching", sequence, *origin)
    draft.set_value("batching", options_of(chosen, BatchingSpec), *origin, strategy)
    _without_batches(draft, (*origin, strategy))


def _iterate(draft: EntryDraft, slots: int, kinds: Sequence[str]) -> None:
    """Write the options of iterative sequences: a stepped callable, whose requests have one row."""
    origin = ("sequence_batching", "iterative_sequence")
    draft.set_value("max_active", slots, *origin)
    if draft.entry.get("max_batch_size"):
        draft.entry["max_batch_size"] = 1
    if any(one.HasField("reshape") for one in (*draft.message.input, *draft.message.output)):
        draft.add_fault(origin, "reshape does not go with iterative_sequence: reshape in the model.py")
    for key in ("batch_input", "batch_output"):
        if getattr(draft.message, key):
            draft.add_fault((key,), f"{key} does not go with iterative_sequence, whose batches change")
    if doubled := [kind for kind in kinds if kinds.count(kind) > 1]:
        text = f"two control inputs are of kind {doubled[0]}, expected one at most"
        draft.add_fault(("sequence_batching", "control_input"), text)
    for path in _WITHOUT_ITERATIONS:
        if draft.pbtxt.has("sequence_batching", *path):
            text = f"{path[-1]} has no effect with iterative_sequence: a request is in every step"
            draft.add_note(("sequence_batching", *path), text)


def _rounded(value: float) -> float:
    """Return the number that was written, and not the nearest 32-bit float."""
    return value if isinstance(value, int) else float(f"{value:.7g}")


def _control(draft: EntryDraft, given: Any, origin: Path, number: int) -> dict[str, Any]:
    if len(given.control) != 1:
        count = len(given.control)
        draft.add_fault(origin, f"control_input {given.name!r} has {count} controls, expected one")
        return {"name": given.name, "kind": CORRID}
    (control,) = given.control
    kind = pb.ModelSequenceBatching.Control.Kind.Name(control.kind).removeprefix("CONTROL_SEQUENCE_").lower()
    entry: dict[str, Any] = {"name": given.name, "kind": kind}
    at = (*origin, "control", 0)
    given_as = [field for field in _FLAGS if getattr(control, field)]
    if kind == CORRID:
        if given_as:
            draft.add_fault((*at, given_as[0]), f"{given_as[0]} does not go with a correlation id")
        if control.data_type == pb.TYPE_INVALID:
            draft.add_fault(at, "a correlation id has no data_type; expected one such as TYPE_UINT64")
        else:
            entry["dtype"] = datatype(control.data_type)
        return entry
    if len(given_as) != 1:
        text = f"control_input {given.name!r} must have one of {', '.join(_FLAGS)}, given {listed(given_as)}"
        draft.add_fault(at, text)
    for field in given_as:
        draft.record_origin(("sequence_batching", "controls", number, "false_true"), (*at, field))
        values = [_rounded(one) for one in getattr(control, field)]
        entry |= {"dtype": _FLAGS[field], "false_true": values}
    return entry


#: The version of an ensemble without a version folder: an ensemble has no file to put into the folder.
_ONLY: Final = 1
_TENSORS: Final = {"inputs": "input", "outputs": "output"}
_IMAGE_DIMS: Final = 3


@dataclass(frozen=True)
class Translation:
    """The entries of a model folder. ``asks``: the model declares the rest. ``config``: for clients."""

    folder: ModelFolder
    draft: EntryDraft
    entries: tuple[dict[str, Any], ...]
    asks: bool = False
    config: Any = None


def translated(folder: ModelFolder, pbtxt: Pbtxt, has_gpu: Callable[[], bool]) -> Translation:
    """Return the translation of a model folder; there are no entries if the draft has faults."""
    draft = EntryDraft(folder.name, pbtxt)
    config = draft.message
    if config.name not in ("", folder.name):
        text = f"the model is called {config.name!r}, its folder {folder.name!r}; they must agree"
        draft.add_fault(("name",), text)
    for path, rule in findings(config):
        if rule.treatment is Treatment.REFUSED:
            draft.add_fault(path, f"{path[-1]} cannot be honoured: {rule.text}")
        else:
            draft.add_note(path, f"{path[-1]} has no effect: {rule.text}")
    if folder.config is None and not folder.versions and not folder.problem:
        draft.add_fault((), f"the folder is no model: expected a {CONFIG} and version folders (1, 2, …)")
        return Translation(folder, draft, ())
    versions = _versions(draft, folder)
    files = folder.versions.get(versions[-1], frozenset()) if versions else frozenset()
    try:
        name = backend_name(config, files)
        backend = None if name == ENSEMBLE else triton_backend_of(name)
    except UnknownBackend as error:
        draft.add_fault(("backend",) if config.backend else ("platform",), str(error))
        return Translation(folder, draft, ())
    asks = backend is not None and not (config.input and config.output)
    _write(draft, backend, asks, folder, has_gpu)
    entries = [
        draft.entry | {"version": one} | ({} if backend is None else callable_of(draft, backend, folder, one))
        for one in versions
    ]
    kept = () if draft.faults else tuple(entries)
    return Translation(folder, draft, kept, asks, normalized(draft, backend))


def _write(
    draft: EntryDraft, backend: Backend | None, asks: bool, folder: ModelFolder, has_gpu: Callable[[], bool]
) -> None:
    config = draft.message
    if not asks or draft.pbtxt.has("max_batch_size"):
        draft.set_value("max_batch_size", config.max_batch_size, "max_batch_size")
    for key, field in _TENSORS.items():
        if not asks or getattr(config, field):
            given = enumerate(getattr(config, field))
            draft.set_value(key, [_tensor(draft, one, (field, at), folder) for at, one in given], field)
    schedule(draft)
    if config.model_transaction_policy.decoupled:
        draft.set_value("decoupled", True, "model_transaction_policy", "decoupled")
    if config.response_cache.enable:
        draft.set_value("response_cache", True, "response_cache", "enable")
    warm_up(draft, folder)
    if backend is not None:
        place_instances(draft, has_gpu)
    elif config.instance_group:
        text = "instance_group does not go with an ensemble: give it to the models of its steps"
        draft.add_fault(("instance_group",), text)


def _tensor(draft: EntryDraft, given: Any, origin: Path, folder: ModelFolder) -> dict[str, Any]:
    if given.data_type == pb.TYPE_INVALID:
        expected = "expected one such as TYPE_FP32 or TYPE_STRING"
        draft.add_fault(origin, f"tensor {given.name!r} has no data_type; {expected}")
        return {}
    if not draft.pbtxt.has(*origin, "dims"):
        expected = "expected a list such as [ -1 ], or [ ] for a scalar"
        draft.add_fault(origin, f"tensor {given.name!r} has no dims; {expected}")
    shape = list(given.dims)
    if 0 in shape:
        text = f"tensor {given.name!r} has a dim of 0; expected sizes of at least 1, or -1 for any size"
        draft.add_fault((*origin, "dims"), text)
    entry: dict[str, Any] = {"name": given.name, "dtype": datatype(given.data_type), "shape": shape}
    if given.HasField("reshape"):
        _check_reshape(draft, given, (*origin, "reshape"))
    if origin[0] == "output":
        if given.label_filename:
            entry["label_filename"] = os.path.join(os.path.abspath(folder.path), given.label_filename)
        return entry
    if given.optional:
        entry["optional"] = True
    if given.format != pb.ModelInput.FORMAT_NONE and len(shape) != _IMAGE_DIMS:
        draft.add_fault((*origin, "format"), f"format needs {_IMAGE_DIMS} dims, given {shape}")
    merges = draft.message.max_batch_size > 0 or not draft.pbtxt.has("max_batch_size")
    if given.allow_ragged_batch and merges:
        entry["ragged"] = True
        if given.HasField("reshape"):
            draft.add_fault((*origin, "reshape"), "reshape does not go with allow_ragged_batch")
    return entry


def _check_reshape(draft: EntryDraft, given: Any, origin: Path) -> None:
    dims, shape = list(given.dims), list(given.reshape.shape)
    if draft.message.HasField("ensemble_scheduling"):
        draft.add_fault(origin, "reshape does not go with an ensemble: give it to the models of its steps")
    elif not shape and draft.message.max_batch_size == 0 and draft.pbtxt.has("max_batch_size"):
        text = f"reshape of {given.name!r} must not be empty, because the model does not batch"
        draft.add_fault(origin, text)
    elif _blocks(dims) != _blocks(shape):
        text = f"reshape of {given.name!r} must have as many elements and free sizes as its dims {dims}"
        draft.add_fault(origin, f"{text}, given {shape}")


def _blocks(shape: Iterable[int]) -> list[int]:
    """Return the numbers of elements between the free sizes of a shape."""
    found = [1]
    for size in shape:
        if size < 0:
            found.append(1)
        else:
            found[-1] *= size
    return found


def _versions(draft: EntryDraft, folder: ModelFolder) -> list[int]:
    """Return the versions that are served, or [] with a fault."""
    policy = draft.message.version_policy
    if policy.HasField("latest") and policy.latest.num_versions < 1:
        text = f"expected at least 1 version, given {policy.latest.num_versions}"
        draft.add_fault(("version_policy", "latest", "num_versions"), text)
    kind = policy.WhichOneof("policy_choice") or "latest"
    origin: Path = ("version_policy", kind)
    named = list(policy.specific.versions)
    versions = versions_served(kind, folder.versions, policy.latest.num_versions, named)
    missing = sorted(set(named).difference(folder.versions)) if kind == "specific" else []
    there = f"its version folders are {listed(sorted(folder.versions))}"
    if draft.message.HasField("ensemble_scheduling") and not folder.versions:
        return named or [_ONLY]
    if not folder.versions:
        file = os.path.join(folder.path, "1")
        draft.add_fault((), f"the model has no version folder: expected its file in {file}")
    elif not versions:
        text = f"no version that version_policy names is there: expected {listed(named)}; {there}"
        draft.add_fault(origin, text)
    elif missing:
        text = f"version_policy names versions that are not there ({listed(missing)}); {there}"
        draft.add_note(origin, text)
    return versions
