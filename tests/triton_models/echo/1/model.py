"""Gives its inputs back, each response with how many requests came together."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_optional_input({"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "TEXT_OUT", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(64)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        return [self._response(one, len(requests)) for one in requests]

    def _response(self, request, count):
        outputs = [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())]
        text = pb_utils.get_input_tensor_by_name(request, "TEXT")
        if text is not None:
            outputs.append(pb_utils.Tensor("TEXT_OUT", text.as_numpy().astype(np.object_)))
        return pb_utils.InferenceResponse(outputs, parameters={"together": count})
