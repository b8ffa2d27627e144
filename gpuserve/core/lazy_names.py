"""Public names of a package that are imported on first use, so that the package itself imports fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package; ``homes`` are the names of each module, or
    ``name=its name there``.
    """
    home_of = {}
    for module, names in homes.items():
        for public, _, own in (one.partition("=") for one in names.split()):
            home_of[public] = module, own or public

    def imported(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import importlib

        module, own = home_of[name]
        value = getattr(importlib.import_module(module), own)
        setattr(sys.modules[package], name, value)
        return value

    return imported, lambda: sorted({*vars(sys.modules[package]), *home_of})
