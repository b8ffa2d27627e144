"""From a folder to the class in its ``model.py``, and what the process knows of the model that it serves. One
process has one such model: its modules are found as Triton's stub finds them.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, Final, NamedTuple

from gpuserve.python_backend.errors import TritonModelException
from gpuserve_worker.calling.callable import LoadError, UncachedSource
from gpuserve_worker.calling.context import ALONE, ModelContext, current_model
from gpuserve_worker.calling.failure import log_text, log_traceback

CLASS: Final = "TritonPythonModel"
_IMPORTABLE: Final = os.path.join(os.path.dirname(__file__), "importable")


class ServedModel(NamedTuple):
    """The model of this process. ``folder`` is that of its version, where ``model.py`` is."""

    name: str
    version: int
    folder: str


class _Process:
    """What holds for all threads of this process, also those that the model starts."""

    model: ServedModel | None = None
    context: ModelContext = ALONE


def serve(model: ServedModel) -> None:
    """Let this process serve a model from now on."""
    _Process.model = model
    with suppress(LookupError):  # made by hand
        _Process.context = current_model()


def served() -> ServedModel:
    """The model that this process serves; ``TritonModelException``: it serves none."""
    if _Process.model is None:
        raise TritonModelException(
            "no model is served here: this only works inside a model.py that a server runs"
        )
    return _Process.model


def context() -> ModelContext:
    """The worker that this thread or this process is; one that has no server where there is none."""
    try:
        return current_model()
    except LookupError:  # a thread that the model has started
        return _Process.context


def get_model_dir() -> str:
    """The folder that ``model.py`` is in."""
    return served().folder


def import_class(model_dir: str, version: str, file: str) -> Any:
    """The ``TritonPythonModel`` of a version of a model; ``LoadError``: there is none, or the file raised."""
    folder = os.path.join(model_dir, version)
    path = os.path.join(folder, file)
    if not os.path.isfile(path):
        raise LoadError(f"there is no file {path}")
    _extend_path(folder, model_dir)
    package = ModuleType(version)
    package.__path__ = [folder]
    name = f"{version}.{file.removesuffix('.py')}"
    sys.modules[version] = package
    loader = UncachedSource(name, path)
    module = module_from_spec(ModuleSpec(name, loader, origin=path))
    module.__file__ = path
    sys.modules[name] = module  # in the place of another model of this version, where a process tests several
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise LoadError(f"importing {file} raised {log_text(error)}", log_traceback(error)) from None
    return _class_in(module, file)


def _extend_path(*folders: str) -> None:
    """Let the neighbours of ``model.py`` be imported, after all else, and find our own module first."""
    if _IMPORTABLE not in sys.path:
        sys.path.insert(0, _IMPORTABLE)
    sys.path += [one for one in folders if one not in sys.path]


def _class_in(module: ModuleType, file: str) -> Any:
    found = getattr(module, CLASS, None)
    if isinstance(found, type):
        return found
    defined = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    classes = f"; it defines {', '.join(map(repr, defined))}" if defined else ""
    raise LoadError(
        f"{file} has no class {CLASS}, which is what a model of Triton's Python backend is{classes}"
    )
