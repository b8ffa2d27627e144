"""Models without a server, for tests of their own: one is loaded as a worker loads it, given requests as a
worker gives them, and what it answers is checked as a worker checks it, in this very process.

::

from gpuserve.testing import open_triton_model, run_callable, run_triton_model

outputs = run_triton_model("models/double", {"x": [[1.0, 2.0]]}) assert outputs["y"].tolist() == [[2.0, 4.0]]
"""

from gpuserve.testing.answers import Outputs
from gpuserve.testing.local_model import LocalModel
from gpuserve.testing.opening import open_callable, open_triton_model, run_callable, run_triton_model
from gpuserve_worker.calling.questions import ModelCallError

__all__ = [
    "LocalModel",
    "ModelCallError",
    "Outputs",
    "open_callable",
    "open_triton_model",
    "run_callable",
    "run_triton_model",
]
