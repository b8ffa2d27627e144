"""``AsyncioDecoupledModelClient``: the responses of a decoupled model as an asynchronous generator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final

from gpuserve.client.aio_base import AsyncioClient
from gpuserve.client.failures import inference_error
from gpuserve.client.inputs import Arrays
from gpuserve.client.streaming import check_grpc, is_empty, is_final, no_response
from gpuserve.client.url import ServerUrl

#: How long a server may take to end a stream whose last response it has sent.
_END_S: Final = 1.0


class AsyncioDecoupledModelClient(AsyncioClient):
    """An asyncio client of one decoupled model, over gRPC; ``AsyncioClient`` says what the arguments are.

    ``inference_timeout_s`` is how long each response may take.
    """

    def infer_sample(
        self,
        *inputs: Any,
        parameters: Mapping[str, str | int | bool] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        **named_inputs: Any,
    ) -> AsyncGenerator[Arrays, None]:
        """Infer one sample: the responses as they come. Closing the generator takes the request back.

        Raises:
            ClientValueError, ClientInferenceServerError, ClientClosedError: see ``ModelClient.infer_sample``.
            ClientTimeoutError: a response did not come in time, or the model did not get ready.
        """
        return self._responses(inputs, named_inputs, parameters, headers, sample=True)

    def infer_batch(
        self,
        *inputs: Any,
        parameters: Mapping[str, str | int | bool] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        **named_inputs: Any,
    ) -> AsyncGenerator[Arrays, None]:
        """Infer a batch; otherwise as ``infer_sample``.

        Raises:
            ClientModelDoesntSupportBatchingError: the model does not batch.
        """
        return self._responses(inputs, named_inputs, parameters, headers, sample=False)

    def _check_url(self, url: ServerUrl) -> None:
        check_grpc(url, type(self).__name__)

    async def _responses(
        self,
        inputs: tuple[Any, ...],
        named: Mapping[str, Any],
        parameters: Mapping[str, Any] | None,
        headers: Mapping[str, Any] | None,
        *,
        sample: bool,
    ) -> AsyncGenerator[Arrays, None]:
        requests = await self._requests()
        connection = self._connection()
        requests.check_kind(decoupled=True, sample=sample)
        arguments = requests.arguments(inputs, named, parameters, headers, sample=sample)
        metadata = arguments.pop("headers")
        stream = connection.stream_infer(_only(arguments), headers=metadata)
        final = False
        try:
            while not final:
                result = await self._next(stream)
                if result is None:
                    return
                final = is_final(result)
                if not (final and is_empty(result)):
                    yield requests.arrays(result, sample=sample)
        finally:
            if not final:
                stream.cancel()  # does nothing to a stream that has ended
            await _end(stream)

    async def _next(self, stream: Any) -> Any:
        """The next result, None at the end of the stream.

        Raises:
            ClientTimeoutError: it does not come in time. ClientInferenceServerError: it is an error.
        """
        timeout_s = self.settings.inference_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                result, error = await anext(stream)
        except StopAsyncIteration:
            return None
        except TimeoutError as late:
            raise no_response(self.settings.shown, timeout_s) from late
        except self._library.errors as failed:
            self._check_open()
            raise inference_error(failed, timeout_s) from failed
        if error is not None:
            raise inference_error(error, timeout_s)
        return result


async def _end(stream: Any) -> None:
    """Wait until grpc is done with the stream: what it still had to do would outlive the event loop."""
    rest = asyncio.ensure_future(stream.__anext__())
    await asyncio.wait({rest}, timeout=_END_S)
    if not rest.done():
        stream.cancel()
    elif not rest.cancelled():
        rest.exception()  # which is nobody's


async def _only(arguments: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield arguments
