"""A model that asks another twice, the second time with what came the first time."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The model y = x, by way of two requests to echo."""

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        y = pb_utils.get_input_tensor_by_name(request, "x")
        for _ in range(2):
            asked = pb_utils.InferenceRequest(
                model_name="echo", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", y.as_numpy())]
            )
            response = asked.exec()
            if response.has_error():
                return response
            y = pb_utils.get_output_tensor_by_name(response, "y")
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", y.as_numpy())])
