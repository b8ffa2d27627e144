"""PyTriton's import paths on gpuserve, so that a program written for it runs as it is::

    gpuserve run program.py

Each module here has the name and the public names of one of PyTriton's. What they do is gpuserve's; what is
here is the map: names (everywhere), options (``triton_config.py``), errors (``translation.py``). Submodules
are imported on first use: a worker that imports ``pytriton.decorators`` does not pay for a server.
"""

from __future__ import annotations

from typing import Any

#: The version of PyTriton whose API this is, for programs that look.
__version__ = "0.7.0"

__all__ = ["__version__", "client", "model_config", "triton"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
