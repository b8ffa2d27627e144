"""Decoupled: sends as its input says, and mostly wrongly."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def response(text="y"):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([text], np.object_))])


def refusal(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class TritonPythonModel:
    def execute(self, requests):
        how = pb_utils.get_input_tensor_by_name(requests[0], "HOW").as_numpy()[0].decode()
        return getattr(self, how)(requests[0].get_response_sender())

    def right(self, sender):
        sender.send(response(), FINAL)

    def returns_a_list(self, sender):
        return [response()]

    def raises_between(self, sender):
        sender.send(response())
        raise ValueError("in the middle")

    def lets_go(self, sender):
        sender.send(response())

    def sends_no_response(self, sender):
        sender.send(response(refusal(sender.send)))
        sender.send(response(refusal(sender.send, {"Y": 1})))
        sender.send(response(refusal(sender.send, response(), 7)))
        sender.send(flags=FINAL)

    def goes_on_after_its_end(self, sender):
        sender.send(response(), FINAL)
        print(f"afterwards: {refusal(sender.send, response())}")

    def refuses(self, sender):
        sender.send(response())
        error = pb_utils.TritonError("that is all", pb_utils.TritonError.UNAVAILABLE)
        sender.send(pb_utils.InferenceResponse(error=error), FINAL)
