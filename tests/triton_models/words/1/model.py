"""Decoupled and async: sends a text word by word, the last one as the final response."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "WORD", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_model_transaction_policy({"decoupled": True})
        return config

    async def execute(self, requests):
        await asyncio.gather(*[self._send(one) for one in requests])

    async def _send(self, request):
        sender = request.get_response_sender()
        *words, last = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].split()
        for word in words:
            sender.send(self._response(word))
            await asyncio.sleep(0)
        sender.send(self._response(last), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _response(self, word):
        return pb_utils.InferenceResponse([pb_utils.Tensor("WORD", np.array([word], np.object_))])
