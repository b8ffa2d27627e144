"""``import pytriton`` means ``gpuserve.compat.pytriton``, also where a PyTriton is installed. A finder that
comes before all others maps every name below ``pytriton`` to the very same module here. Processes that are
started from here find ``compat/importable``, whose ``pytriton`` calls ``install()`` when it is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import MutableMapping, Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

ALIAS: Final = "pytriton"
TARGET: Final = __package__
IMPORTABLE: Final = Path(__file__).parents[1] / "importable"
_PATH_VARIABLE: Final = "PYTHONPATH"


class _SameModule(Loader):
    """Loads a module that has another name already. It keeps that name, and its own ``__spec__``."""

    def __init__(self, real: ModuleSpec) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._real.name)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of a module of ours, as ``python -m`` runs it under the other name."""
        loader = self._real.loader
        assert isinstance(loader, InspectLoader), "a module of ours is a file"
        return loader.get_code(self._real.name)

    def exec_module(self, module: ModuleType) -> None:
        """It has run. The import system has just put the alias's spec into it."""
        module.__spec__ = self._real


class _AliasFinder(MetaPathFinder):
    """Finds ``pytriton`` and all below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ALIAS and not fullname.startswith(f"{ALIAS}."):
            return None
        real = importlib.util.find_spec(TARGET + fullname.removeprefix(ALIAS))
        if real is None:
            return None
        is_package = real.submodule_search_locations is not None
        spec = ModuleSpec(fullname, _SameModule(real), origin=real.origin, is_package=is_package)
        if is_package:
            spec.submodule_search_locations = real.submodule_search_locations
        return spec


def install() -> None:
    """From now on ``pytriton`` is this package, here and in processes that are started from here. Raises
    ImportError: another one has been imported already.
    """
    known = sys.modules.get(ALIAS)
    if known is not None and known is not sys.modules.get(TARGET) and _is_another(known):
        raise ImportError(
            f"pytriton was imported already, from {known.__file__}: restart Python, and call this before"
        )
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder())
    make_importable(os.environ)


def _is_another(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).parent not in (IMPORTABLE / ALIAS, Path(__file__).parent)


def make_importable(environ: MutableMapping[str, str]) -> None:
    """A Python that is started with these variables finds ``pytriton`` here, before any installed one."""
    before = environ.get(_PATH_VARIABLE)
    paths = before.split(os.pathsep) if before else []
    if str(IMPORTABLE) not in paths:
        environ[_PATH_VARIABLE] = os.pathsep.join([str(IMPORTABLE), *paths])
