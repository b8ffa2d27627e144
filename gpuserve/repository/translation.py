"""From a model's folder to the entries of a config file that stand for it, one a version, so that whatever is
known of config files (schema, rules, ``ModelSpec``) holds for them as well. Pure: the folder was read before.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.config.positions import Path
from gpuserve.repository.backends import ENSEMBLE, Backend, UnknownBackend, backend_name, backend_of
from gpuserve.repository.callables import callable_of, normalized
from gpuserve.repository.draft import Draft, listed
from gpuserve.repository.fields import Treatment, findings
from gpuserve.repository.folders import ModelFolder, chosen
from gpuserve.repository.instances import place_instances
from gpuserve.repository.pbtxt import Pbtxt
from gpuserve.repository.scheduling import datatype, schedule
from gpuserve.repository.warmups import warm_up

#: The version of an ensemble that has no version folder: it has nothing to put there.
_ONLY: Final = 1
_TENSORS: Final = {"inputs": "input", "outputs": "output"}


@dataclass(frozen=True)
class Translation:
    """What a model's folder comes to. ``asks``: what the config.pbtxt leaves out is for the model itself to
    say. ``config`` is the ``ModelConfig`` that clients are told.
    """

    folder: ModelFolder
    draft: Draft
    entries: tuple[dict[str, Any], ...]
    asks: bool = False
    config: Any = None

    @property
    def members(self) -> list[str]:
        """The models of the steps of an ensemble."""
        return [one.model_name for one in self.draft.message.ensemble_scheduling.step]


def translated(folder: ModelFolder, pbtxt: Pbtxt, has_gpu: Callable[[], bool]) -> Translation:
    """The entries of a model, none where its faults say why."""
    draft = Draft(folder.name, pbtxt)
    config = draft.message
    if config.name not in ("", folder.name):
        draft.fault(
            ("name",), f"the model is called {config.name!r}, its folder {folder.name!r}; they must agree"
        )
    for path, rule in findings(config):
        if rule.treatment is Treatment.REFUSED:
            draft.fault(path, f"{path[-1]} cannot be honoured: {rule.text}")
        else:
            draft.note(path, f"{path[-1]} has no effect: {rule.text}")
    versions = _versions(draft, folder)
    files = folder.versions.get(versions[-1], frozenset()) if versions else frozenset()
    try:
        name = backend_name(config, files)
        backend = None if name == ENSEMBLE else backend_of(name)
    except UnknownBackend as error:
        draft.fault(("backend",) if config.backend else ("platform",), str(error))
        return Translation(folder, draft, ())
    asks = backend is not None and not (config.input and config.output)
    _write(draft, backend, asks, folder, has_gpu)
    entries = tuple(_entries(draft, backend, folder, versions))
    return Translation(folder, draft, () if draft.faults else entries, asks, normalized(draft, backend))


def _write(
    draft: Draft, backend: Backend | None, asks: bool, folder: ModelFolder, has_gpu: Callable[[], bool]
) -> None:
    """Write what is alike in all versions."""
    config = draft.message
    if not asks or draft.pbtxt.has("max_batch_size"):
        draft.put("max_batch_size", config.max_batch_size, "max_batch_size")
    for key, field in _TENSORS.items():
        if not asks or getattr(config, field):
            tensors = [
                _tensor(draft, one, (key, number), (field, number), folder)
                for number, one in enumerate(getattr(config, field))
            ]
            draft.put(key, tensors, field)
    schedule(draft)
    if config.model_transaction_policy.decoupled:
        draft.put("decoupled", True, "model_transaction_policy", "decoupled")
    if config.response_cache.enable:
        draft.put("response_cache", True, "response_cache", "enable")
    warm_up(draft, folder)
    if backend is not None:
        place_instances(draft, has_gpu)
    elif config.instance_group:
        draft.fault(
            ("instance_group",),
            "instance_group does not go with an ensemble: give it to the models of its steps",
        )


def _tensor(draft: Draft, given: Any, into: Path, origin: Path, folder: ModelFolder) -> dict[str, Any]:
    for ours, theirs in (("name", "name"), ("dtype", "data_type"), ("shape", "dims")):
        draft.came((*into, ours), (*origin, theirs))
    draft.came(into, origin)
    if given.data_type == pb.TYPE_INVALID:
        draft.fault(
            origin, f"tensor {given.name!r} has no data_type; expected one such as TYPE_FP32 or TYPE_STRING"
        )
        return {}
    if not draft.pbtxt.has(*origin, "dims"):
        draft.fault(
            origin, f"tensor {given.name!r} has no dims; expected a list such as [ -1 ], or [ ] for a scalar"
        )
    entry: dict[str, Any] = {
        "name": given.name,
        "dtype": datatype(given.data_type),
        "shape": list(given.dims),
    }
    if given.HasField("reshape"):
        _check_reshape(draft, given, (*origin, "reshape"))
    if into[0] == "inputs" and given.optional:
        entry["optional"] = True
    if into[0] == "outputs" and given.label_filename:
        entry["label_filename"] = os.path.join(os.path.abspath(folder.path), given.label_filename)
        draft.came((*into, "label_filename"), (*origin, "label_filename"))
    return entry


def _check_reshape(draft: Draft, given: Any, origin: Path) -> None:
    dims, shape = list(given.dims), list(given.reshape.shape)
    if draft.message.HasField("ensemble_scheduling"):
        draft.fault(origin, "reshape does not go with an ensemble: give it to the models of its steps")
    elif dims.count(-1) != shape.count(-1) or math.prod(map(abs, dims)) != math.prod(map(abs, shape)):
        draft.fault(
            origin,
            f"reshape of {given.name!r} must have as many elements and free sizes as its dims {dims}, "
            f"given {shape}",
        )


# ---- versions ------------------------------------------------------------------------------------


def _versions(draft: Draft, folder: ModelFolder) -> list[int]:
    """The versions that are served; none where a fault says why."""
    policy = draft.message.version_policy
    kind = policy.WhichOneof("policy_choice") or "latest"
    origin: Path = ("version_policy", kind)
    named = list(policy.specific.versions)
    versions = chosen(kind, folder.versions, policy.latest.num_versions, named)
    missing = sorted(set(named).difference(folder.versions)) if kind == "specific" else []
    there = f"its version folders are {listed(sorted(folder.versions))}"
    if draft.message.HasField("ensemble_scheduling") and not folder.versions:
        return named or [_ONLY]
    if not folder.versions:
        draft.fault(
            (), f"the model has no version folder: expected its file in {os.path.join(folder.path, '1')}"
        )
    elif not versions:
        draft.fault(
            origin, f"no version that version_policy names is there: expected {listed(named)}; {there}"
        )
    elif missing:
        draft.note(origin, f"version_policy names versions that are not there ({listed(missing)}); {there}")
    return versions


def _entries(
    draft: Draft, backend: Backend | None, folder: ModelFolder, versions: list[int]
) -> Iterator[dict[str, Any]]:
    for version in versions:
        callable_ = {} if backend is None else callable_of(draft, backend, folder, version)
        yield draft.entry | {"version": version} | callable_
