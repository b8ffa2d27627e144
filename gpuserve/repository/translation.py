"""From a model's folder to the entries of a config file that stand for it, one a version, so that whatever is
known of config files (schema, rules, ``ModelSpec``) holds for them as well. Pure: the folder was read before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.config.positions import Path
from gpuserve.front.v2.model_config import plain
from gpuserve.repository.backends import ENSEMBLE, Backend, UnknownBackend, backend_name, backend_of
from gpuserve.repository.draft import Draft, listed
from gpuserve.repository.fields import Treatment, findings
from gpuserve.repository.folders import ModelFolder, chosen
from gpuserve.repository.instances import place_instances
from gpuserve.repository.pbtxt import Pbtxt
from gpuserve.repository.scheduling import datatype, schedule
from gpuserve.repository.warmups import warm_up
from gpuserve.runtimes.table import runtime_of

#: The version of an ensemble that has no version folder: it has nothing to put there.
_ONLY: Final = 1
#: The parameter by which a Python model names its environment, and what stands for its folder in it.
_ENVIRONMENT: Final = "EXECUTION_ENV_PATH"
_MODEL_FOLDER: Final = "$$TRITON_MODEL_DIRECTORY"
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
    if into[0] == "inputs" and given.optional:
        entry["optional"] = True
    if into[0] == "outputs" and given.label_filename:
        entry["label_filename"] = os.path.join(os.path.abspath(folder.path), given.label_filename)
        draft.came((*into, "label_filename"), (*origin, "label_filename"))
    return entry


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
        source = {} if backend is None else _source(draft, backend, folder, version)
        yield draft.entry | {"version": version} | source


def _source(draft: Draft, backend: Backend, folder: ModelFolder, version: int) -> dict[str, Any]:
    """The callable of a version, and what it is made with."""
    config = draft.message
    names = (config.default_model_filename,) if config.default_model_filename else backend.files
    there = folder.versions[version]
    found = next((one for one in names if one.split("/")[0] in there), None)
    if found is None:
        path = os.path.join(folder.path, str(version))
        draft.fault(
            ("default_model_filename",),
            f"there is no {' or '.join(names)} in {path}, which has {listed(sorted(there))}",
        )
        return {}
    if backend.takes_config:
        arguments: dict[str, Any] = {
            "model_dir": os.path.abspath(folder.path),
            "version": str(version),
            "file": found,
            "config": json.dumps(plain(normalized(draft, backend))),
        }
        return {
            "callable": backend.callable,
            "kwargs": arguments,
            **_environment(draft, folder),
            **backend.options,
        }
    path, arguments = folder.file(version, found), _parameters(draft, backend)
    known = runtime_of(path)
    if known is None or known.path != backend.callable:  # its name does not say what it is
        return {"callable": backend.callable, "kwargs": {"file": path, **arguments}, **backend.options}
    return {"callable": path, "kwargs": arguments, **backend.options}


def _environment(draft: Draft, folder: ModelFolder) -> dict[str, str]:
    """The Python environment of the workers, where the model names one."""
    if _ENVIRONMENT not in draft.message.parameters:
        return {}
    path = draft.message.parameters[_ENVIRONMENT].string_value
    draft.came(("python",), ("parameters", _ENVIRONMENT))
    whole = path.replace(_MODEL_FOLDER, os.path.abspath(folder.path))
    return {"python": os.path.join(os.path.abspath(folder.path), whole)}


def _parameters(draft: Draft, backend: Backend) -> dict[str, Any]:
    """The parameters of a backend that its callable takes as arguments; the others are noted."""
    found: dict[str, Any] = {}
    for name, value in draft.message.parameters.items():
        if name in backend.parameters:
            argument, read = backend.parameters[name]
            try:
                found[argument] = read(value.string_value)
            except ValueError as error:
                draft.fault(("parameters", name), f"parameter {name!r}: {error}")
        else:
            draft.note(
                ("parameters", name),
                f"parameter {name!r} has no effect: backend {backend.name} takes none of it here",
            )
    return found


def normalized(draft: Draft, backend: Backend | None) -> Any:
    """The ``ModelConfig`` with its name, and with the names of its backend, as Triton completes it."""
    config = pb.ModelConfig()
    config.CopyFrom(draft.message)
    config.name = draft.name
    config.platform = ENSEMBLE if backend is None else config.platform or backend.platform
    config.backend = "" if backend is None else backend.name
    return config
