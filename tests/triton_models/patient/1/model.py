"""Computes until its client has gone, or not at all for what is negative; a file tells how far it is."""

import json
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.file = Path(json.loads(args["model_config"])["parameters"]["file"]["string_value"])

    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "X")
        if x.as_numpy()[0] >= 0:
            self.file.write_text("runs")
            while not requests[0].is_cancelled():
                pass
            self.file.write_text("cancelled")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x.as_numpy())]) for _ in requests]
