"""Returns or raises from ``execute`` what a request names, a method beginning with ``execute_``."""

import numpy as np
import triton_python_backend_utils as pb_utils


def said():
    return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array(['"right"'], dtype=object))])


class TritonPythonModel:
    def execute(self, requests):
        name = pb_utils.get_input_tensor_by_name(requests[0], "PROBE").as_numpy()[0].decode()
        return getattr(self, f"execute_{name}")(requests)

    def execute_no_list(self, _):
        return 7

    def execute_a_response(self, _):
        return said()

    def execute_too_few(self, _):
        return []

    def execute_too_many(self, _):
        return [said(), said()]

    def execute_no_response(self, _):
        return [7]

    def execute_raises(self, _):
        raise ValueError("seven is odd")

    def execute_raises_a_key(self, _):
        return {}["seven"]

    def execute_raises_its_exception(self, _):
        raise pb_utils.TritonModelException("seven is odd")

    def execute_unknown(self, requests):
        return self.failed(pb_utils.TritonError.UNKNOWN)

    def execute_unavailable(self, requests):
        return self.failed(pb_utils.TritonError.UNAVAILABLE)

    def execute_already_exists(self, requests):
        return self.failed(pb_utils.TritonError.ALREADY_EXISTS)

    def execute_cancelled(self, requests):
        return self.failed(pb_utils.TritonError.CANCELLED)

    def execute_unsupported(self, requests):
        return self.failed(pb_utils.TritonError.UNSUPPORTED)

    def failed(self, code):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no", code))]
