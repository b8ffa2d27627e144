"""Two responses a request, one second apart; requests overlap."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()

    def answer(self, sender):
        for number in range(2):
            time.sleep(1)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([number], np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
