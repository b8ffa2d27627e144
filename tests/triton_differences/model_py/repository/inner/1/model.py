"""Doubles; what is below 0 is refused, and 7 raises."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(one) for one in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if x[0] == 7:
            raise ValueError("seven")
        if x.min() < 0:
            error = pb_utils.TritonError("nothing below 0", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * x)])
