"""The model of ``steps.py`` as iterative sequences: a request gets ``n`` responses, one an iteration."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

STEP_S, ROW_S = 2e-3, 20e-6
_PR_SET_TIMERSLACK = 29
_START = 1


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.left: dict[int, int] = {}

    def execute(self, requests: list[Any]) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # else each sleep is 50 µs longer
        time.sleep(STEP_S + ROW_S * len(requests))
        for request in requests:
            self._iterate(request)

    def _iterate(self, request: Any) -> None:
        number = request.correlation_id()
        if request.flags() & _START:
            self.left[number] = int(pb_utils.get_input_tensor_by_name(request, "n").as_numpy()[0, 0])
        left = self.left[number] = self.left[number] - 1
        response = pb_utils.InferenceResponse([pb_utils.Tensor("left", np.array([[left]], np.int32))])
        if left > 0:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            request.get_response_sender().send(response)
        else:
            del self.left[number]
            request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
