"""Tells what it was initialized with, and what its requests say of themselves."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        return [self._response(one) for one in requests]

    def _response(self, request):
        told = {
            "args": self.args,
            "model_dir": pb_utils.get_model_dir(),
            "request_id": request.request_id(),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "parameters": json.loads(request.parameters()),
            "requested": sorted(request.requested_output_names()),
            "inputs": [
                [one.name(), one.triton_dtype(), one.shape(), one.is_cpu()] for one in request.inputs()
            ],
            "is_cancelled": request.is_cancelled(),
            "trace": request.trace().get_context(),
        }
        text = np.array([json.dumps(told)], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("FACTS", text)])
