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

from typing import TYPE_CHECKING

from gpuserve.core.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "gpuserve.testing.local_models": "LocalModel",
        "gpuserve_worker.inference.model_calls": "ModelCallError",
        "gpuserve.testing.local_requests": "Outputs WrongCall",
        "gpuserve.testing.targets": "open_callable open_triton_model run_callable run_triton_model",
        "gpuserve.testing.testing_client": "TestClient",
    },
)
