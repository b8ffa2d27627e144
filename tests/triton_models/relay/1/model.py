"""Decoupled and batched: answers at once, but requests named "waits" with those of the next batch."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "NAME", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "NAME_OUT", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(2)
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args):
        self.waiting = []

    def execute(self, requests):
        ready, self.waiting = self.waiting, []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "NAME")
            (self.waiting if name.as_numpy()[0, 0] == b"waits" else ready).append((request, name))
        for request, name in ready:
            output = pb_utils.Tensor("NAME_OUT", name.as_numpy())
            request.get_response_sender().send(
                pb_utils.InferenceResponse([output]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
