"""Has a request come again as often as it says, and answers with how often it came; also decoupled."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.came = {}
        self.is_decoupled = '"decoupled": true' in args["model_config"]

    def execute(self, requests):
        responses = [self._response(one) for one in requests]
        return None if self.is_decoupled else responses

    def _response(self, request):
        self.came[request.request_id()] = came = self.came.get(request.request_id(), 0) + 1
        if came < pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0]:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([came], np.float32))])
        if not self.is_decoupled:
            return response
        request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
