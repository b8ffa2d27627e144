"""Decoupled: sends 0, 1, 2 … from a thread of its own, as many as are asked for. Below 0, three requests wait
for each other after their first response.
"""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "COUNT", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "INDEX", "data_type": "TYPE_INT32", "dims": [1]})
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args):
        self.threads = []
        self.meeting = threading.Barrier(3)

    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            thread = threading.Thread(target=self._send, args=(request.get_response_sender(), count))
            thread.start()
            self.threads.append(thread)

    def _send(self, sender, count):
        for index in range(abs(count)):
            if index and count < 0:
                self.meeting.wait(20)
            output = pb_utils.Tensor("INDEX", np.array([index], np.int32))
            sender.send(pb_utils.InferenceResponse([output]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        for thread in self.threads:
            thread.join()
        print(f"finalized after {len(self.threads)} requests")
