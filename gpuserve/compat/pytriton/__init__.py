"""PyTriton's import paths on gpuserve, so that a program written for PyTriton runs unchanged (``gpuserve run
program.py``). Modules and their public names are PyTriton's. Submodules are imported on first use, so that a
worker that imports ``pytriton.decorators`` does not import a server.
"""

from __future__ import annotations

from typing import Any

#: The version of PyTriton whose API this is, for programs that check it.
__version__ = "0.7.0"

__all__ = ["__version__", "client", "model_config", "triton"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
