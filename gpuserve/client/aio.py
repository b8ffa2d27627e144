"""``AsyncioModelClient``: inferences as coroutines, any number at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuserve.client.aio_base import AsyncioClient
from gpuserve.client.failures import inference_error
from gpuserve.client.inputs import Arrays


class AsyncioModelClient(AsyncioClient):
    """An asyncio client of one model, over HTTP or gRPC; ``AsyncioClient`` says what the arguments are, and
    ``ModelClient`` what parameters and headers do.
    """

    async def infer_sample(
        self,
        *inputs: Any,
        parameters: Mapping[str, str | int | bool] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        **named_inputs: Any,
    ) -> Arrays:
        """Infer one sample; see ``ModelClient.infer_sample``, which raises the same."""
        return await self._infer(inputs, named_inputs, parameters, headers, sample=True)

    async def infer_batch(
        self,
        *inputs: Any,
        parameters: Mapping[str, str | int | bool] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        **named_inputs: Any,
    ) -> Arrays:
        """Infer a batch; see ``ModelClient.infer_batch``, which raises the same."""
        return await self._infer(inputs, named_inputs, parameters, headers, sample=False)

    async def _infer(
        self,
        inputs: tuple[Any, ...],
        named: Mapping[str, Any],
        parameters: Mapping[str, Any] | None,
        headers: Mapping[str, Any] | None,
        *,
        sample: bool,
    ) -> Arrays:
        requests = await self._requests()
        connection = self._connection()
        requests.check_kind(decoupled=False, sample=sample)
        arguments = requests.arguments(inputs, named, parameters, headers, sample=sample)
        timeout_s = self.settings.inference_timeout_s
        if self._library.timeout_a_call:
            arguments["client_timeout"] = timeout_s
        try:
            result = await connection.infer(**arguments)
        except self._library.errors as error:
            raise inference_error(error, timeout_s) from error
        return requests.arrays(result, sample=sample)
