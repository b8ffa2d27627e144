"""As many responses as the input says; the end comes by itself, or with the last one where it is below 0."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0])
            for number in range(abs(count)):
                output = pb_utils.Tensor("y", np.array([number], np.float32))
                last = count < 0 and number == abs(count) - 1
                sender.send(pb_utils.InferenceResponse([output]), flags=FINAL if last else 0)
            if count >= 0:
                sender.send(flags=FINAL)
