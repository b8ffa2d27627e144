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
from gpuserve.backends.python_backend.iterative import IterativeModel
from gpuserve.backends.python_backend.model_server import ServedModel, set_served_model
from gpuserve.backends.sequences import iterative_slots
from gpuserve.decorators.wrapping import served_model
from gpuserve_worker.inference.callable_loading import LoadError, UncachedSource
from gpuserve_worker.inference.failure import log_text, log_traceback

_OPTIONAL: Final = "optional"
_INPUT_PROPERTIES: Final = ("name", "data_type", "dims", _OPTIONAL)
_OUTPUT_PROPERTIES: Final = ("name", "data_type", "dims")
_SCHEDULERS: Final = ("sequence_batching", "ensemble_scheduling")
_POLICY: Final = "model_transaction_policy"
_DECOUPLED: Final = "decoupled"
_COMPLETE: Final = "auto_complete_config"
#: Without one of these schedulers every request is a batch of its own.
_BATCH_SCHEDULERS: Final = frozenset({"dynamic_batching", "sequence_batching"})


class ModelConfig:
    """A configuration to complete. Values that contradict it raise ``ValueError``."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)
        self._name = self._model_config.get("name", "")

    def as_dict(self) -> dict[str, Any]:
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch. Raise ``ValueError`` if the configuration has a larger one."""
        configured = self._model_config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config function "
                f"for model '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching. Raise ``ValueError`` if the model has another scheduler."""
        for scheduler in _SCHEDULERS:
            if scheduler in self._model_config:
                raise ValueError(
                    f"configuration specified scheduling_choice as '{scheduler}', but auto-complete-config "
                    f"function for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set whether the model is decoupled. Raise ``ValueError`` if the configuration differs."""
        for key in transaction_policy_dict:
            if key != _DECOUPLED:
                raise ValueError(
                    f"model transaction property in auto-complete-config function for model '{self._name}' "
                    f"contains property {key!r}, which is other than 'decoupled'"
                )
        policy = self._model_config.setdefault(_POLICY, {})
        if _DECOUPLED not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict[_DECOUPLED]
        if policy.get(_DECOUPLED, wanted) != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', "
                f"which is already set to '{policy[_DECOUPLED]}'"
            )
        policy[_DECOUPLED] = wanted

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002 - Triton's name
        """Add an input: name, data_type and dims. Raise ``ValueError`` if it is configured otherwise."""
        self._add("input", input, _INPUT_PROPERTIES)

    def add_optional_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002 - as above
        """Add an input that requests may omit. Raise as ``add_input``."""
        self.add_input({**input, _OPTIONAL: True})

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output: name, data_type and dims. Raise ``ValueError`` if it is configured otherwise."""
        self._add("output", output, _OUTPUT_PROPERTIES)

    def _add(self, kind: str, tensor: Mapping[str, Any], properties: tuple[str, ...]) -> None:
        self._check_properties(kind, tensor, properties)
        tensors = self._model_config.setdefault(kind, [])
        for configured in tensors:
            if configured.get("name") == tensor["name"]:
                self._check_same(kind, configured, tensor)
                configured.update(tensor)
                return
        tensors.append(dict(tensor))

    def _check_properties(self, kind: str, tensor: Mapping[str, Any], properties: tuple[str, ...]) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        named = f"{kind} '{tensor['name']}'" if "name" in tensor else kind
        for key in tensor:
            if key not in properties:
                known = f"{', '.join(map(repr, properties[:-1]))} and {properties[-1]!r}"
                raise ValueError(f"{named} {where} contains property {key!r}, which is other than {known}")
        for key in _OUTPUT_PROPERTIES:
            if key not in tensor:
                raise ValueError(f"{named} {where} is missing {key!r} property")

    def _check_same(self, kind: str, configured: Mapping[str, Any], tensor: Mapping[str, Any]) -> None:
        name = tensor["name"]
        datatype = configured.get("data_type", "TYPE_INVALID")
        if datatype not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {datatype} for {kind} "
                f"'{name}', model provides {tensor['data_type']}"
            )
        dims = configured.get("dims")
        if dims and [int(one) for one in dims] != list(tensor["dims"]):
            raise ValueError(
                f"model '{self._name}', tensor '{name}': the model expects dims {list(tensor['dims'])} but "
                f"the model configuration specifies dims {list(dims)}"
            )
        optional = tensor.get(_OPTIONAL)
        if optional is not None and configured.get(_OPTIONAL, optional) != optional:
            raise ValueError(
                f"model '{self._name}', tensor '{name}': the model expects optional {optional} but the model "
                f"configuration specifies optional {configured[_OPTIONAL]}"
            )


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of an input, or None if there is no input of this name."""
    return next((one for one in model_config.get("input", ()) if one.get("name") == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of an output, or None if there is no output of this name."""
    return next((one for one in model_config.get("output", ()) if one.get("name") == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether a model sends any number of responses to a request."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def completed_config(model_class: Any, config: str) -> str:
    """Return the configuration after the class's ``auto_complete_config``, if any. Raise LoadError."""
    complete = getattr(model_class, _COMPLETE, None)
    if complete is None:
        return config
    try:
        completed = complete(ModelConfig(config))
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise LoadError(f"{_COMPLETE} raised {log_text(error)}", log_traceback(error)) from None
    if not isinstance(completed, ModelConfig):
        raise LoadError(
            f"{_COMPLETE} must return the pb_utils.ModelConfig that it was given, but returned "
            f"{type(completed).__name__}"
        )
    return json.dumps(completed.as_dict())


def config_entry(config: str) -> dict[str, Any]:
    """Convert Triton's JSON to the keys of a config file's entry that ``auto_complete_config`` can set."""
    declared = json.loads(config)
    slots, rows = iterative_slots(declared), int(declared.get("max_batch_size", 0))
    return {
        "inputs": [_tensor_entry(one) for one in declared.get("input", ())],
        "outputs": [_tensor_entry(one) for one in declared.get("output", ())],
        "max_batch_size": min(1, rows) if slots else rows,
        "decoupled": using_decoupled_model_transaction_policy(declared),
        "batching": {"merge": not _BATCH_SCHEDULERS.isdisjoint(declared)},
        "request_details": True,
        "strict": False,  # Triton lets a model omit outputs
        **({"max_active": slots} if slots else {}),
    }


def _tensor_entry(declared: Mapping[str, Any]) -> dict[str, Any]:
    dims = declared.get("reshape", {}).get("shape") or declared.get("dims", ())
    datatype = str(declared.get("data_type", "")).removeprefix("TYPE_")
    entry = {
        "name": declared.get("name", ""),
        "dtype": "BYTES" if datatype == "STRING" else datatype,
        "shape": [int(one) for one in dims],
    }
    return entry | ({"optional": True} if declared.get("optional") else {})


_FILE: Final = "model.py"
_CLASS: Final = "TritonPythonModel"
_IMPORTABLE: Final = os.path.join(os.path.dirname(__file__), "importable")


class TritonModel:
    """A model in Triton's folder layout.

    The result is one of four classes, by the configuration and the ``execute`` of the model.

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
    ) -> ReturningModel | AwaitingModel | SendingModel | IterativeModel:
        name, model_class, config = _described_model(model_dir, version, file, config, auto_complete)
        arguments = _initialize_arguments(name, model_dir, version, config, device)
        model = _initialized_model(model_class, file, arguments)
        instance = arguments["model_instance_name"]
        values, served = json.loads(config), served_model()
        if served is None:
            outputs = [one["name"] for one in values.get("output", ())]
        else:
            outputs = [one.name for one in served.outputs]
        made: ReturningModel | AwaitingModel | SendingModel | IterativeModel
        decoupled = using_decoupled_model_transaction_policy(values)
        if iterative_slots(values):
            made = IterativeModel(model, outputs, instance, values, decoupled=decoupled)
        elif decoupled:
            made = SendingModel(model, outputs, instance, merges=values.get("max_batch_size", 0) > 0)
        elif inspect.iscoroutinefunction(model.execute):
            made = AwaitingModel(model, outputs, instance)
        else:
            made = ReturningModel(model, outputs, instance)
        if tensors := batch_tensors_in(values):
            made.batch_tensors = BatchTensors(**tensors)
        return made

    @classmethod
    def declare(cls, device: str = "cpu", **model: Any) -> Mapping[str, Any]:
        """Return what the configuration declares, after ``model.py`` has completed the configuration."""
        return config_entry(_described_model(**model)[2])


def _described_model(
    model_dir: str, version: str = "1", file: str = _FILE, config: str = "", auto_complete: bool = True
) -> tuple[str, Any, str]:
    """Import a model, and make it the model of this process. Return the name under which the model is served,
    its class, and its configuration after ``model.py`` has completed it. Without a server, the name is that
    of the folder. Raise LoadError.
    """
    model_class = import_class(model_dir, version, file)
    model = served_model()
    name = os.path.basename(os.path.abspath(model_dir)) if model is None else model.name
    set_served_model(ServedModel(name, int(version), os.path.join(model_dir, version)))
    empty = {"name": name, "backend": "python", "max_batch_size": 0, "input": [], "output": []}
    config = config or json.dumps(empty)
    return name, model_class, completed_config(model_class, config) if auto_complete else config


def _initialize_arguments(
    name: str, model_dir: str, version: str, config: str, device: str
) -> dict[str, str]:
    """Return the argument of ``initialize``. A worker sees only its own GPU, which has number 0 there."""
    model = served_model()
    number = "0" if model is None else model.instance.rpartition("#")[2]
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
