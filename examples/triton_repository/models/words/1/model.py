"""Counts the words of texts."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.separator = config["parameters"]["separator"]["string_value"].encode()
        count = pb_utils.get_output_config_by_name(config, "count")
        self.dtype = pb_utils.triton_string_to_numpy(count["data_type"])

    def execute(self, requests):
        return [self.response(request) for request in requests]

    def response(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        if not all(texts.ravel()):
            error = pb_utils.TritonError("a text is empty", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        counts = [[len(text.split(self.separator))] for text in texts.ravel()]
        return pb_utils.InferenceResponse([pb_utils.Tensor("count", np.array(counts, self.dtype))])
