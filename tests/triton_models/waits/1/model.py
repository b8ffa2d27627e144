"""Awaits before it returns, and raises for what is negative."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.sleep(0.001)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", self._root(one))]) for one in requests]

    def _root(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        if (values < 0).any():
            raise ValueError("there is no root of what is negative")
        return values**0.5
