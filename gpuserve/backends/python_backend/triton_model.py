"""The inference callable of a ``model.py``, imported as Triton's stub does; one a process."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, Final

from gpuserve.backends.batch_tensors import BatchTensors, batch_tensors_in
from gpuserve.backends.python_backend.execution import AwaitingModel, ReturningModel, SendingModel
from gpuserve.backends.python_backend.model_config import (
    completed_config,
    config_entry,
    using_decoupled_model_transaction_policy,
)
from gpuserve.backends.python_backend.model_server import ServedModel, set_served_model
from gpuserve_worker.inference.callable_loading import LoadError, UncachedSource
from gpuserve_worker.inference.failure import log_text, log_traceback
from gpuserve_worker.inference.model_context import current_model

_FILE: Final = "model.py"
_CLASS: Final = "TritonPythonModel"
_IMPORTABLE: Final = os.path.join(os.path.dirname(__file__), "importable")


class TritonModel:
    """A model in Triton's folder layout.

    The result is one of three classes, by the ``execute`` of the model.

    Args:
        model_dir: Folder of the model.
        version: Name of the version's folder.
        file: Name of the Python file in the version's folder.
        config: Model configuration as JSON; "" if ``auto_complete_config`` sets all of it.
        auto_complete: Whether ``auto_complete_config`` may complete the configuration.
        device: The instance's device, such as "cpu" or "cuda:0".

    Raises:
        LoadError: if there is no such file or class, or if user code raised.
    """

    def __new__(  # type: ignore[misc]  # a factory that is a class because it has ``declare``
        cls,
        model_dir: str,
        version: str = "1",
        file: str = _FILE,
        config: str = "",
        auto_complete: bool = True,
        device: str = "cpu",
    ) -> ReturningModel | AwaitingModel | SendingModel:
        model_class = import_class(model_dir, version, file)
        name = _served_name(model_dir)
        set_served_model(ServedModel(name, int(version), os.path.join(model_dir, version)))
        config = config or _empty_config(name)
        if auto_complete:
            config = completed_config(model_class, config)
        arguments = _initialize_arguments(name, model_dir, version, config, device)
        model = _initialized_model(model_class, file, arguments)
        instance = arguments["model_instance_name"]
        outputs, values = _output_names(config), json.loads(config)
        made: ReturningModel | AwaitingModel | SendingModel
        if using_decoupled_model_transaction_policy(values):
            made = SendingModel(model, outputs, instance, merges=values.get("max_batch_size", 0) > 0)
        elif inspect.iscoroutinefunction(model.execute):
            made = AwaitingModel(model, outputs, instance)
        else:
            made = ReturningModel(model, outputs, instance)
        if tensors := batch_tensors_in(values):
            made.batch_tensors = BatchTensors(**tensors)
        return made

    @classmethod
    def declare(
        cls,
        model_dir: str,
        version: str = "1",
        file: str = _FILE,
        config: str = "",
        auto_complete: bool = True,
        device: str = "cpu",
    ) -> Mapping[str, Any]:
        """Return what the configuration declares, after ``model.py`` has completed the configuration."""
        name = _served_name(model_dir)
        model_class = import_class(model_dir, version, file)
        set_served_model(ServedModel(name, int(version), os.path.join(model_dir, version)))
        config = config or _empty_config(name)
        return config_entry(completed_config(model_class, config) if auto_complete else config)


def _served_name(model_dir: str) -> str:
    """Return the name under which the model is served. Without a server, return the name of its folder."""
    try:
        return current_model().name
    except LookupError:
        return os.path.basename(os.path.abspath(model_dir))


def _empty_config(name: str) -> str:
    """Return a configuration that ``model.py`` has to complete."""
    return json.dumps({"name": name, "backend": "python", "max_batch_size": 0, "input": [], "output": []})


def _output_names(config: str) -> tuple[str, ...]:
    """Return the server's declared outputs, or without a server the configured ones."""
    try:
        return tuple([one.name for one in current_model().outputs])
    except LookupError:
        return tuple([one["name"] for one in json.loads(config).get("output", ())])


def _initialize_arguments(
    name: str, model_dir: str, version: str, config: str, device: str
) -> dict[str, str]:
    """Return the argument of ``initialize``. A worker sees only its own GPU, which has number 0 there."""
    try:
        number = current_model().instance.rpartition("#")[2]
    except LookupError:
        number = "0"
    groups = json.loads(config).get("instance_group") or [{"name": name}]
    return {
        "model_config": config,
        "model_instance_kind": "CPU" if device == "cpu" else "GPU",
        "model_instance_name": f"{groups[0].get('name') or f'{name}_0'}_{number}",
        "model_instance_device_id": "0" if device == "cpu" else device.rpartition(":")[2] or "0",
        "model_repository": os.path.abspath(model_dir),
        "model_version": version,
        "model_name": name,
    }


def _initialized_model(model_class: Any, file: str, arguments: dict[str, str]) -> Any:
    """Create and initialize the model. Raise ``LoadError`` if that is impossible."""
    if not callable(getattr(model_class, "execute", None)):
        raise LoadError(f"{_CLASS} in {file} has no method execute(self, requests)")
    try:
        model = model_class()
        if hasattr(model, "initialize"):
            model.initialize(arguments)
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise LoadError(f"initialize of {file} raised {log_text(error)}", log_traceback(error)) from None
    return model


def import_class(model_dir: str, version: str, file: str) -> Any:
    """Return the ``TritonPythonModel`` of a version's ``model.py``; raise LoadError if that fails."""
    folder = os.path.join(model_dir, version)
    path = os.path.join(folder, file)
    if not os.path.isfile(path):
        raise LoadError(f"there is no file {path}")
    if _IMPORTABLE not in sys.path:
        # As in Triton's stub, the current folder is first. Our modules come before any installed ones.
        sys.path[:0] = ["", _IMPORTABLE]
    sys.path += [one for one in (folder, model_dir) if one not in sys.path]
    package = ModuleType(version)
    package.__path__ = [folder]
    name = f"{version}.{file.removesuffix('.py')}"
    sys.modules[version] = package
    loader = UncachedSource(name, path)
    module = module_from_spec(ModuleSpec(name, loader, origin=path))
    module.__file__ = path
    sys.modules[name] = module  # replaces another model of this version in a process that tests several
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise LoadError(f"importing {file} raised {log_text(error)}", log_traceback(error)) from None
    return _model_class(module, file)


def _model_class(module: ModuleType, file: str) -> Any:
    found = getattr(module, _CLASS, None)
    if isinstance(found, type):
        return found
    defined = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    classes = f"; it defines {', '.join(map(repr, defined))}" if defined else ""
    raise LoadError(
        f"{file} has no class {_CLASS}, which is what a model of Triton's Python backend is{classes}"
    )
