"""Doubles X, and says which request it was asked by; what is below 0 is refused."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "SAID", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        return [self.answer(one) for one in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        if x.min() < 0:
            error = pb_utils.TritonError("nothing below 0", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        said = [request.request_id(), request.timeout(), json.loads(request.parameters())]
        said.append(sorted(request.requested_output_names()))
        outputs = [
            pb_utils.Tensor("Y", 2 * x),
            pb_utils.Tensor("SAID", np.array([json.dumps(said)], dtype=object)),
        ]
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([one for one in outputs if not wanted or one.name() in wanted])
