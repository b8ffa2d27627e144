"""Completes its own configuration, with everything that a model can say there."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        auto_complete_model_config.set_max_batch_size(8)
        auto_complete_model_config.set_dynamic_batching()
        auto_complete_model_config.add_input({"name": "a", "data_type": "TYPE_FP32", "dims": [4]})
        auto_complete_model_config.add_input(
            {"name": "b", "data_type": "TYPE_STRING", "dims": [-1], "optional": True}
        )
        auto_complete_model_config.add_output({"name": "c", "data_type": "TYPE_INT64", "dims": [2, 3]})
        return auto_complete_model_config

    def execute(self, requests):
        zeros = np.zeros((1, 2, 3), np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("c", zeros)]) for _ in requests]
