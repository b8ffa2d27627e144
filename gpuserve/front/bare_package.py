"""A package of which only single modules are wanted: they are imported, and its ``__init__`` never runs.

Only for a process in which nothing but this server runs: whoever imports the package finds it empty.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec


def make_bare(name: str) -> None:
    """Have ``import name.module`` leave the package's own code out, in this process from now on.

    To the import system it is then a namespace package in the same place. Where it was imported before, or
    is not installed, nothing changes.

    Raises:
        ModuleNotFoundError: the package around it is not installed.
    """
    if name in sys.modules:
        return
    found = importlib.util.find_spec(name)  # which imports the packages around it, and not this one
    if found is None or found.submodule_search_locations is None:
        return
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = list(found.submodule_search_locations)
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    parent, _, attribute = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], attribute, package)
