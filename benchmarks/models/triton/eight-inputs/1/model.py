"""The model with eight inputs as plain Triton's Python backend runs it; see ``echo`` beside it."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The model y = a, request by request. Every input is read, as ``@batch`` reads them."""

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        inputs = {one.name(): one.as_numpy() for one in request.inputs()}
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", inputs["a"])])
