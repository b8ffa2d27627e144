"""The inference callable of a model of Triton's Python backend: ``TritonModel`` makes the
``TritonPythonModel`` of a ``model.py``, and what hands it the batches of a worker. How those are run is in
``running.py``; tensors, requests and responses have files of their own.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from typing import Any, Final

from gpuserve.python_backend.config_lookup import using_decoupled_model_transaction_policy
from gpuserve.python_backend.declaring import completed_config, declared_keys
from gpuserve.python_backend.model_file import CLASS, ServedModel, import_class, serve
from gpuserve.python_backend.running import AwaitingModel, ReturningModel, SendingModel
from gpuserve_worker.calling.callable import LoadError
from gpuserve_worker.calling.context import current_model
from gpuserve_worker.calling.failure import log_text, log_traceback

_FILE: Final = "model.py"


class TritonModel:
    """A model whose folder in Triton's layout is ``model_dir``. ``config`` is its configuration as JSON; the
    file may complete where ``auto_complete``. What is made is as its ``execute`` asks for.
    """

    def __new__(  # type: ignore[misc]  # a factory, which is a class for the sake of ``declare``
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
        serve(ServedModel(name, int(version), os.path.join(model_dir, version)))
        config = _config(model_class, config or _least_config(name), auto_complete)
        model = _initialized(model_class, file, _arguments(name, model_dir, version, config, device))
        outputs = _output_names(config)
        if using_decoupled_model_transaction_policy(json.loads(config)):
            return SendingModel(model, outputs, merges=json.loads(config).get("max_batch_size", 0) > 0)
        awaits = inspect.iscoroutinefunction(model.execute)
        return AwaitingModel(model, outputs) if awaits else ReturningModel(model, outputs)

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
        """What the configuration says of the model, after ``model.py`` has completed it."""
        name = _served_name(model_dir)
        model_class = import_class(model_dir, version, file)
        serve(ServedModel(name, int(version), os.path.join(model_dir, version)))
        return declared_keys(_config(model_class, config or _least_config(name), auto_complete))


def _served_name(model_dir: str) -> str:
    """The name under which the model is served; outside of a server that of its folder."""
    try:
        return current_model().name
    except LookupError:
        return os.path.basename(os.path.abspath(model_dir))


def _least_config(name: str) -> str:
    """A configuration that ``model.py`` has to complete."""
    return json.dumps({"name": name, "backend": "python", "max_batch_size": 0, "input": [], "output": []})


def _config(model_class: Any, config: str, auto_complete: bool) -> str:
    return completed_config(model_class, config) if auto_complete else config


def _output_names(config: str) -> tuple[str, ...]:
    """The declared outputs: those that the server knows of, where there is one."""
    try:
        return tuple([one.name for one in current_model().outputs])
    except LookupError:
        return tuple([one["name"] for one in json.loads(config).get("output", ())])


def _arguments(name: str, model_dir: str, version: str, config: str, device: str) -> dict[str, str]:
    """What ``initialize`` is given. A worker sees no GPU but its own, which is number 0 there."""
    try:
        number = current_model().instance.rpartition("#")[2]
    except LookupError:
        number = "0"
    return {
        "model_config": config,
        "model_instance_kind": "CPU" if device == "cpu" else "GPU",
        "model_instance_name": f"{_group(name, config)}_{number}",
        "model_instance_device_id": "0" if device == "cpu" else device.rpartition(":")[2] or "0",
        "model_repository": os.path.abspath(model_dir),
        "model_version": version,
        "model_name": name,
    }


def _group(name: str, config: str) -> str:
    """The name of the model's group of instances. One that the configuration leaves out is the model's."""
    groups = json.loads(config).get("instance_group") or [{"name": name}]
    return str(groups[0].get("name") or f"{name}_0")


def _initialized(model_class: Any, file: str, arguments: dict[str, str]) -> Any:
    """The model, made and initialized; ``LoadError``: it raised, or it cannot be executed."""
    if not callable(getattr(model_class, "execute", None)):
        raise LoadError(f"{CLASS} in {file} has no method execute(self, requests)")
    try:
        model = model_class()
        if hasattr(model, "initialize"):
            model.initialize(arguments)
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise LoadError(f"initialize of {file} raised {log_text(error)}", log_traceback(error)) from None
    return model
