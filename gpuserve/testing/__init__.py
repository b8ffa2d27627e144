"""Models under test without a deployment: loaded in this process by a worker's code, or behind a server of
the test.

In this process, requests are checked as a front checks them, and answers as a worker checks them.

::

    from gpuserve.testing import TestClient

    with TestClient("models/double") as client:
        assert client.infer("double", x=[[1.0, 2.0]])["y"].tolist() == [[2.0, 4.0]]

Public names are imported on first use, because pytest imports this package for its plugin in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuserve.testing.local_models import LocalModel
    from gpuserve.testing.local_requests import Outputs, WrongCall
    from gpuserve.testing.targets import open_callable, open_triton_model, run_callable, run_triton_model
    from gpuserve.testing.testing_client import TestClient
    from gpuserve_worker.inference.model_calls import ModelCallError

__all__ = [
    "LocalModel", "ModelCallError", "Outputs", "TestClient", "WrongCall", "open_callable",
    "open_triton_model", "run_callable", "run_triton_model",
]  # fmt: skip

_MODULES = {
    "LocalModel": "gpuserve.testing.local_models",
    "ModelCallError": "gpuserve_worker.inference.model_calls",
    "Outputs": "gpuserve.testing.local_requests",
    "TestClient": "gpuserve.testing.testing_client",
    "WrongCall": "gpuserve.testing.local_requests",
    "open_callable": "gpuserve.testing.targets",
    "open_triton_model": "gpuserve.testing.targets",
    "run_callable": "gpuserve.testing.targets",
    "run_triton_model": "gpuserve.testing.targets",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
