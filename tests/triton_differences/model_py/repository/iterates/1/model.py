"""Answers a request of n iterations with what each of them was told: the flags and the control inputs."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.told = {}

    def execute(self, requests):
        responses = [self.iterate(one) for one in requests]
        return None if self.decoupled else responses

    def iterate(self, request):
        values = {one.name(): one.as_numpy() for one in request.inputs()}
        number = request.correlation_id()
        if not values["READY"].ravel()[0]:  # Triton fills free slots with requests whose inputs are not set
            return pb_utils.InferenceResponse([])
        if int(values["n"].ravel()[0]) < 0:
            raise ValueError("n is negative")
        if request.flags() & 1:
            self.told[number] = []
        controls = [int(values[name].ravel()[0]) for name in ("START", "READY", "END")]
        same = number == int(values["ID"].ravel()[0]) and values["ID"].shape == (1, 1)
        told = self.told[number]
        told.append([request.flags(), *controls, int(same)])
        is_last = len(told) >= int(values["n"].ravel()[0])
        array = np.array([told[-1:] if self.decoupled else told], np.int32)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("iterations", array)])
        if is_last:
            del self.told[number]
        else:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if self.decoupled:
            request.get_response_sender().send(response, int(is_last))
            return None
        return response if is_last else None
