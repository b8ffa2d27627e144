"""Not decoupled, and answers by response senders: at once, or from a thread, as its input says."""

import threading

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if values[0] < 0:
                threading.Thread(target=self._send, args=(request, values)).start()
            else:
                self._send(request, values)

    def _send(self, request, values):
        response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", -values)])
        request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
