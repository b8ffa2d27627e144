"""Decoupled: a thread sends two responses, and then nothing, not even that these were all."""

import threading

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            threading.Thread(target=self._send, args=(request.get_response_sender(), values)).start()

    def _send(self, sender, values):
        for _ in range(2):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", -values)]))
        threading.Event().wait(600)
