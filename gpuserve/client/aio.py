"""The asyncio clients: ``AsyncioClient``, and ``AsyncioModelClient``, whose inferences are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

from gpuserve.client.base import ModelClientBase, Values
from gpuserve.client.config import ClientModelConfig
from gpuserve.client.request_builder import Arrays, RequestBuilder


class AsyncioClient(ModelClientBase):
    """An asyncio client of one model; ``ModelClientBase`` says what the arguments are.

    It belongs to one event loop, and any number of its tasks may use it.
    """

    _aio = True

    def _begin(self) -> None:
        self._building = asyncio.Lock()

    async def __aenter__(self) -> Self:
        if not self._lazy:
            try:
                await self._requests()
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Using the client afterwards is a ClientClosedError."""
        self._closed = True
        connection, self._connection_made = self._connection_made, None
        if connection is not None:
            await connection.close()

    @property
    def model_config(self) -> Awaitable[ClientModelConfig]:
        """The model's configuration, to be awaited; waits for the model at first.

        Raises:
            ClientTimeoutError, ClientModelUnavailableError: see ``wait_for_model``.
        """
        return self._config()

    async def wait_for_server(self, timeout_s: float) -> None:
        """Wait until the server is ready.

        Raises:
            ClientTimeoutError: it is not, in that time.
        """
        await self._wait_for_server(timeout_s)

    async def wait_for_model(self, timeout_s: float) -> None:
        """Wait until the model is ready.

        Raises:
            ClientTimeoutError: it is not, in that time. ClientModelUnavailableError: the server answers and
                has no such model.
        """
        await self._wait_for_model(timeout_s)

    async def _config(self) -> ClientModelConfig:
        return (await self._requests()).config

    async def _requests(self) -> RequestBuilder:
        """Tasks that come at the same time wait for the first of them."""
        if self._builder is None:
            async with self._building:
                return await super()._requests()
        return self._builder

    async def _call(self, function: Callable[..., Awaitable[Any]], *args: Any, **named: Any) -> Any:
        return await function(*args, **named)


class AsyncioModelClient(AsyncioClient):
    """An asyncio client of one model, over HTTP or gRPC; ``ModelClientBase`` says what the arguments are, and
    ``ModelClient`` what parameters and headers do.
    """

    async def infer_sample(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Arrays:
        """Infer one sample; see ``ModelClient.infer_sample``, which raises the same."""
        return await self._infer(inputs, named_inputs, parameters, headers, sample=True)

    async def infer_batch(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Arrays:
        """Infer a batch; see ``ModelClient.infer_batch``, which raises the same."""
        return await self._infer(inputs, named_inputs, parameters, headers, sample=False)
