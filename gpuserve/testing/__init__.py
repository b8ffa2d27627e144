"""Models without a server, for tests of their own: loaded as a worker loads them, given requests as a front
and a worker judge and give them, and their answers checked as a worker checks them, in this very process; or
behind a server of the test's own.

::

from gpuserve.testing import TestClient

with TestClient("models/double") as client:
    assert client.infer("double", x=[[1.0, 2.0]])["y"].tolist() == [[2.0, 4.0]]

The public names are imported on first use: the plugin of pytest is here, and costs nobody else anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuserve.testing.answers import Outputs
    from gpuserve.testing.client import TestClient
    from gpuserve.testing.local_model import LocalModel
    from gpuserve.testing.opening import open_callable, open_triton_model, run_callable, run_triton_model
    from gpuserve.testing.requests import WrongCall
    from gpuserve_worker.calling.questions import ModelCallError

__all__ = [
    "LocalModel",
    "ModelCallError",
    "Outputs",
    "TestClient",
    "WrongCall",
    "open_callable",
    "open_triton_model",
    "run_callable",
    "run_triton_model",
]

_HOMES = {
    "gpuserve.testing.answers": ("Outputs",),
    "gpuserve.testing.client": ("TestClient",),
    "gpuserve.testing.local_model": ("LocalModel",),
    "gpuserve.testing.opening": ("open_callable", "open_triton_model", "run_callable", "run_triton_model"),
    "gpuserve.testing.requests": ("WrongCall",),
    "gpuserve_worker.calling.questions": ("ModelCallError",),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
