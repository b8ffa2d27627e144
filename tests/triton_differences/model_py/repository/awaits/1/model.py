"""Requests to other models out of an async execute."""

import asyncio
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def asked(model):
    x = pb_utils.Tensor("x", np.array([1], np.float32))
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=["y"], inputs=[x])


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(one) for one in requests]

    async def answer(self, request):
        name = pb_utils.get_input_tensor_by_name(request, "PROBE").as_numpy()[0].decode()
        said = json.dumps(await getattr(self, name)())
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([said], dtype=object))])

    async def awaits_several(self):
        found = await asyncio.gather(*(asked("inner").async_exec() for _ in range(4)))
        return [one.output_tensors()[0].as_numpy().tolist() for one in found]

    async def awaits_streams_at_once(self):
        start = time.monotonic()
        found = await asyncio.gather(*map(self.stream, range(4)))
        return [found, time.monotonic() - start < 4]

    async def stream(self, _):
        responses = await asked("slow").async_exec(decoupled=True)
        return [len(one.output_tensors()) for one in responses][:2]
