"""The model that sleeps, as plain Triton's Python backend runs it."""

from __future__ import annotations

import ctypes
import json
import time
from typing import Any

import triton_python_backend_utils as pb_utils

_PR_SET_TIMERSLACK = 29


class TritonPythonModel:
    """y = x after so many seconds, once a batch. The requests of a batch come unmerged."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._seconds = float(parameters["seconds"]["string_value"])
        self._precise = False

    def execute(self, requests: list[Any]) -> list[Any]:
        if not self._precise:  # the thread that sleeps asks for it itself
            self._precise = True
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        time.sleep(self._seconds)
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", x)])
