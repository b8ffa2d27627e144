"""What runs a model: the callable of its backend, and what that is made with. Pure: which files there are is
known of the folder.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.front.v2.model_config import plain
from gpuserve.repository.backends import ENSEMBLE, Backend
from gpuserve.repository.draft import Draft, listed
from gpuserve.repository.folders import ModelFolder
from gpuserve.runtimes.table import runtime_of, source_of

#: Stands before the callable of a model with other shapes than clients see.
_RESHAPED: Final = "gpuserve.repository.reshaping:ReshapedModel"
#: The parameter by which a Python model names its environment, and what stands for its folder in it.
_ENVIRONMENT: Final = "EXECUTION_ENV_PATH"
_MODEL_FOLDER: Final = "$$TRITON_MODEL_DIRECTORY"


def callable_of(draft: Draft, backend: Backend, folder: ModelFolder, version: int) -> dict[str, Any]:
    """The callable of a version, what it is made with, and what such models need; {} where a fault says why
    there is none.
    """
    return _with_own_shapes(draft, _callable(draft, backend, folder, version))


def _callable(draft: Draft, backend: Backend, folder: ModelFolder, version: int) -> dict[str, Any]:
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


def _with_own_shapes(draft: Draft, source: dict[str, Any]) -> dict[str, Any]:
    """The callable between clients' shapes and the model's, where these are others."""
    inputs = {
        one.name: [list(one.dims), list(one.reshape.shape)]
        for one in draft.message.input
        if one.HasField("reshape")
    }
    outputs = {
        one.name: [list(one.reshape.shape), list(one.dims)]
        for one in draft.message.output
        if one.HasField("reshape")
    }
    if not source or not (inputs or outputs):
        return source
    count = sum(one.get("count", 1) for one in draft.entry.get("instances", ()))
    path, kwargs = source_of(source["callable"], source["kwargs"], ".", count)
    arguments = {"path": path, "kwargs": kwargs, "inputs": inputs, "outputs": outputs}
    return source | {"callable": _RESHAPED, "kwargs": arguments}


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
    """The ``ModelConfig`` as Triton completes it: with the names of the model, of its backend and file, and
    with the versions that it serves where nothing is said of them.
    """
    config = pb.ModelConfig()
    config.CopyFrom(draft.message)
    config.name = draft.name
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if backend is None:
        config.platform = ENSEMBLE
        return config
    config.platform = config.platform or backend.platform
    config.backend = backend.name
    config.default_model_filename = config.default_model_filename or backend.files[0]
    return config
