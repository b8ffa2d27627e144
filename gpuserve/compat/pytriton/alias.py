"""The alias ``pytriton`` of ``gpuserve.compat.pytriton``, also if a PyTriton is installed. A finder before
all others maps every module below ``pytriton`` to the same module here, or to the module that has its names.
Child processes have ``compat/importable`` on their import path, whose ``pytriton`` calls ``install()``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

ALIAS: Final = "pytriton"
DISTRIBUTION: Final = "nvidia-pytriton"
TARGET: Final = __package__
IMPORTABLE: Final = Path(__file__).parents[1] / "importable"
_PATH_VARIABLE: Final = "PYTHONPATH"
#: PyTriton's packages that are one module here with the names of these modules.
_PACKAGES: Final = {
    "check": "utils",
    "client": "client",
    "model_config": "common generator model_config parser tensor triton_model_config",
    "proxy": "telemetry types",
    "utils": "logging workspace",
}
#: PyTriton's modules whose names are in another module here.
_MOVED: Final = {
    "client.asyncio_utils": f"{TARGET}.client.utils",
    "client.auth": "gpuserve.client.client_settings",
    "client.warnings": f"{TARGET}.client.exceptions",
    **{f"{one}.{name}": f"{TARGET}.{one}" for one, names in _PACKAGES.items() for name in names.split()},
}


class _SameModule(Loader):
    """A loader that returns an existing module, which keeps its name and ``__spec__``."""

    def __init__(self, real: ModuleSpec) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._real.name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of our module, which ``python -m`` runs under the other name."""
        loader = self._real.loader
        assert isinstance(loader, InspectLoader), "a module of ours is a file"
        return loader.get_code(self._real.name)

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has just replaced."""
        module.__spec__ = self._real


class _Distribution(importlib.metadata.Distribution):
    """The package that programs ask for PyTriton's version."""

    def read_text(self, filename: str) -> str | None:
        version = importlib.import_module(TARGET).__version__
        text = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path


class _AliasFinder(MetaPathFinder):
    """A finder of ``pytriton``, its submodules and its distribution."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context
    ) -> Iterator[_Distribution]:
        name = (context.name or DISTRIBUTION).lower().replace("_", "-")
        if name == DISTRIBUTION:
            yield _Distribution()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ALIAS and not fullname.startswith(f"{ALIAS}."):
            return None
        name = fullname.removeprefix(f"{ALIAS}.")
        real = importlib.util.find_spec(_MOVED.get(name, TARGET + fullname.removeprefix(ALIAS)))
        if real is None:
            return None
        folders = real.submodule_search_locations
        is_package = name in _PACKAGES or (folders is not None and name not in _MOVED)
        spec = ModuleSpec(fullname, _SameModule(real), origin=real.origin, is_package=is_package)
        if is_package:
            spec.submodule_search_locations = folders or []
        return spec


def install() -> None:
    """Install the alias, also for child processes. Raise ImportError if pytriton is imported."""
    known = sys.modules.get(ALIAS)
    file = getattr(known, "__file__", None)
    own_folders = (IMPORTABLE / ALIAS, Path(__file__).parent)
    if known is not sys.modules.get(TARGET) and file is not None and Path(file).parent not in own_folders:
        raise ImportError(f"pytriton was imported already, from {file}: restart Python, and call this before")
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder())
    add_to_pythonpath(os.environ)


def add_to_pythonpath(environ: MutableMapping[str, str]) -> None:
    """Let a Python that is started with these variables find this ``pytriton`` first."""
    before = environ.get(_PATH_VARIABLE)
    paths = before.split(os.pathsep) if before else []
    if str(IMPORTABLE) not in paths:
        environ[_PATH_VARIABLE] = os.pathsep.join([str(IMPORTABLE), *paths])
