"""The echo model as plain Triton's Python backend runs it.

Its ``execute`` gets the requests of a batch unmerged; each is answered by itself, without the concatenation
and the split that ``@batch`` stands for. That is the fastest way to write an echo for this backend.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The model y = x, request by request."""

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", x)])
