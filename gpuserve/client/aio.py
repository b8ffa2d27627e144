"""The asyncio clients: ``AsyncioClient``, and ``AsyncioModelClient``, whose inferences are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self

from gpuserve.client.base import Found, ModelClientBase, Question, Steps, Values
from gpuserve.client.config import ClientModelConfig
from gpuserve.client.failures import inference_error
from gpuserve.client.library import Library, aio_library
from gpuserve.client.request_builder import Arrays, RequestBuilder


class AsyncioClient(ModelClientBase):
    """An asyncio client of one model; ``ModelClientBase`` says what the arguments are.

    It belongs to one event loop, and any number of its tasks may use it.
    """

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        await self._run(self._server_steps(timeout_s))

    async def wait_for_model(self, timeout_s: float) -> None:
        """Wait until the model is ready.

        Raises:
            ClientTimeoutError: it is not, in that time. ClientModelUnavailableError: the server answers and
                has no such model.
        """
        await self._run(self._model_steps(timeout_s))

    def _load_library(self) -> Library:
        return aio_library(self.settings.url)

    async def _config(self) -> ClientModelConfig:
        return (await self._requests()).config

    async def _requests(self) -> RequestBuilder:
        """What makes the requests, once the model is known to be there. Tasks that come at the same time
        wait for the first of them.
        """
        if self._builder is None:
            self._check_open()
            async with self._building:
                if self._builder is None:
                    self._builder = await self._run(self._build_steps())
        return self._builder

    async def _run(self, steps: Steps[Found]) -> Found:
        """Carry out steps to their end."""
        try:
            step = next(steps)
            while True:
                try:
                    answer = None
                    if isinstance(step, Question):
                        answer = await self._ask(step)
                    else:
                        await asyncio.sleep(step.seconds)
                except self._library.errors as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            found: Found = end.value
            return found

    async def _ask(self, question: Question) -> Any:
        """Call a small method of tritonclient; ``SyncClient`` says over which connection."""
        method, args, timeout_s, more = question
        headers = self.settings.headers()
        self._check_open()
        if self._library.timeout_a_call:
            ask = getattr(self._connection(), method)
            return await ask(*args, headers=headers, client_timeout=timeout_s, **more)
        connection = self._library.connect(self.settings.url, timeout_s)
        async with connection:
            return await getattr(connection, method)(*args, headers=headers, **more)


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

    async def _infer(self, *call: Any, sample: bool) -> Arrays:
        requests = await self._requests()
        connection = self._connection()
        arguments = requests.arguments(*call, decoupled=False, sample=sample)
        timeout_s = self.settings.inference_timeout_s
        if self._library.timeout_a_call:
            arguments["client_timeout"] = timeout_s
        try:
            result = await connection.infer(**arguments)
        except self._library.errors as error:
            raise inference_error(error, timeout_s) from error
        return requests.arrays(result, sample=sample)
