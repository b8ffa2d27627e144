"""Gives a text letter by letter, from a thread, with the number of its words from another model."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "text", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "letter", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "words", "data_type": "TYPE_INT32", "dims": [1]})
        return config

    def initialize(self, args):
        self.threads = []

    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            thread = threading.Thread(target=self.send, args=(request.get_response_sender(), text))
            thread.start()
            self.threads = [*(one for one in self.threads if one.is_alive()), thread]

    def send(self, sender, text):
        words = self.count(text)
        for letter in text[0].decode():
            if sender.is_cancelled():
                break
            output = pb_utils.Tensor("letter", np.array([letter], np.object_))
            sender.send(pb_utils.InferenceResponse([output, pb_utils.Tensor("words", words)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def count(self, text):
        request = pb_utils.InferenceRequest(
            model_name="words",
            requested_output_names=["count"],
            inputs=[pb_utils.Tensor("text", text.reshape(1, 1))],
        )
        response = request.exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.get_output_tensor_by_name(response, "count").as_numpy().reshape(1)

    def finalize(self):
        for thread in self.threads:
            thread.join()
