"""Asks another model several times at once, from a coroutine."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(0)
        return config

    async def execute(self, requests):
        return [await self.answer(one) for one in requests]

    async def answer(self, one):
        x = pb_utils.get_input_tensor_by_name(one, "X").as_numpy()
        asked = [self.ask("asked", "X", x + n).async_exec() for n in range(3)]
        answers = await asyncio.gather(*asked)
        count = np.array([4], np.int32)
        streamed = await self.ask("repeat", "COUNT", count).async_exec(decoupled=True)
        again = await self.ask("repeat", "COUNT", count).async_exec(decoupled=True)
        y = sum(pb_utils.get_output_tensor_by_name(one, "Y").as_numpy() for one in answers)
        y = y + sum([len(one.output_tensors()) async for one in streamed])
        y = y + sum(len(one.output_tensors()) for one in again)
        y = y + sum(await asyncio.gather(*(self.count(-2) for _ in range(3))))
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y.astype(np.float32))])

    async def count(self, count):
        """Blocks the event loop while the responses come."""
        responses = await self.ask("repeat", "COUNT", np.array([count], np.int32)).async_exec(decoupled=True)
        return sum(len(one.output_tensors()) for one in responses)

    def ask(self, model, name, array):
        inputs = [pb_utils.Tensor(name, array)]
        wanted = {"asked": "Y", "repeat": "INDEX"}[model]
        return pb_utils.InferenceRequest(model_name=model, requested_output_names=[wanted], inputs=inputs)
