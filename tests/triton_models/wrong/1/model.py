"""Answers as its input says, and mostly wrongly."""

import numpy as np
import triton_python_backend_utils as pb_utils


def response(name="Y", array=None):
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, np.ones(2, np.float32) if array is None else array)]
    )


class TritonPythonModel:
    def execute(self, requests):
        how = pb_utils.get_input_tensor_by_name(requests[0], "HOW").as_numpy()[0].decode()
        return getattr(self, how)(requests)

    def right(self, requests):
        return [response() for _ in requests]

    def too_few(self, requests):
        return []

    def no_list(self, requests):
        return response()

    def no_response(self, requests):
        return [{"Y": np.ones(2, np.float32)}]

    def nothing(self, requests):
        return None

    def raises(self, requests):
        raise ValueError("the weights in /srv/models/secret.bin are odd")

    def raises_a_key(self, requests):
        return {}["seven"]

    def not_carried(self, requests):
        return [pb_utils.InferenceResponse([], parameters={1: "a"})]

    def no_parameter(self, requests):
        return [pb_utils.InferenceResponse([], parameters={"a": [1]})]

    def another_output(self, requests):
        return [response("Z")]

    def one_output_more(self, requests):
        tensors = [pb_utils.Tensor(name, np.ones(2, np.float32)) for name in ("Y", "Z")]
        return [pb_utils.InferenceResponse(tensors)]

    def text_for_numbers(self, requests):
        return [response(array=np.array([b"x"], np.object_))]

    def refused(self, requests, code=pb_utils.TritonError.NOT_FOUND):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no such page:\n/a/b", code))]

    def unknown(self, requests):
        return self.refused(requests, pb_utils.TritonError.UNKNOWN)

    def sent_and_returned(self, requests):
        sender = requests[0].get_response_sender()
        sender.send(response(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return [response()]
