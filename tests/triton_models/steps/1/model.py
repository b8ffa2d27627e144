"""Counts to n, one iteration a step: each response is the count, and the number of requests in its batch.

A negative n raises; 0 releases the request, and a thread answers it later.
"""

import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.counts = {}
        if "AWAITS" in config["parameters"]:
            self.execute = self.execute_later

    def execute(self, requests):
        responses = [self.iterate(one, len(requests)) for one in requests]
        return None if self.decoupled else responses

    async def execute_later(self, requests):
        return TritonPythonModel.execute(self, requests)

    def iterate(self, request, size):
        n = int(pb_utils.get_input_tensor_by_name(request, "n").as_numpy().ravel()[0])
        if n < 0:
            raise ValueError("n is negative")
        number = request.correlation_id()
        self.counts[number] = count = 1 if request.flags() & 1 else self.counts[number] + 1
        array = np.array([[count, size]], np.int32)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("count", array)])
        if n == 0:
            threading.Timer(0.05, self.send, (request.get_response_sender(), response, True)).start()
            return None
        if count < n:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if self.decoupled:
            self.send(request.get_response_sender(), response, count == n)
            return None
        return response if count == n else None

    def send(self, sender, response, is_last):
        sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0)
