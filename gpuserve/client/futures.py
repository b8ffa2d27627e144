"""``FuturesModelClient``: inferences as futures, run by threads that have a ``ModelClient`` each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Self

from gpuserve.client.base import AnyClient, Values
from gpuserve.client.config import ClientModelConfig
from gpuserve.client.exceptions import ClientClosedError, ClientQueueFullError
from gpuserve.client.pool import PoolClosed, PoolFull, ResourcePool
from gpuserve.client.request_builder import Arrays
from gpuserve.client.settings import ClientSettings
from gpuserve.client.sync import ModelClient
from gpuserve.client.url import HTTP, ServerUrl


class FuturesModelClient(AnyClient):
    """A client of one model for any number of threads, whose calls return ``concurrent.futures.Future``.

    Args:
        url, model_name, model_version, model_config, access_token: see ``ModelClientBase``.
        init_timeout_s, inference_timeout_s, ensure_model_is_ready: see there too.
        max_workers: how many inferences run at once, each over a connection of its own; None is no limit.
        max_queue_size: how many calls wait besides; None is no limit.
        non_blocking: whether a call that finds the queue full is refused at once, instead of after
            ``inference_timeout_s``.

    Raises:
        ClientValueError: an argument is wrong. ValueError: a limit is not above 0.
    """

    def __init__(
        self,
        url: str | ServerUrl,
        model_name: str,
        model_version: str | None = None,
        *,
        max_workers: int | None = 128,
        max_queue_size: int | None = 128,
        non_blocking: bool = False,
        init_timeout_s: float | None = None,
        inference_timeout_s: float | None = None,
        model_config: ClientModelConfig | None = None,
        ensure_model_is_ready: bool = True,
        access_token: str | None = None,
    ) -> None:
        _check_limit("max_workers", max_workers)
        _check_limit("max_queue_size", max_queue_size)
        self.settings = ClientSettings.checked(
            url, model_name, model_version, init_timeout_s, inference_timeout_s, access_token
        )
        self.known_config = model_config
        self._waits = ensure_model_is_ready
        self._limits: dict[str, Any] = {"max_workers": max_workers, "max_queue_size": max_queue_size}
        self._submit_timeout_s = 0.0 if non_blocking else self.settings.inference_timeout_s
        self._pool: ResourcePool[ModelClient] = ResourcePool(self._client, max_workers, max_queue_size)

    @classmethod
    def from_existing_client(cls, existing_client: AnyClient) -> Self:
        """A client of the same model with connections of its own. What the other knows is not asked again."""
        limits = existing_client._limits if isinstance(existing_client, FuturesModelClient) else {}
        return cls(**existing_client.same_arguments(), **limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self, wait: bool = True) -> None:
        """Take no more calls; those made are finished. With ``wait``, return when they are."""
        self._pool.close(wait)

    def infer_sample(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Future[Arrays]:
        """Infer one sample; the future has what ``ModelClient.infer_sample`` returns or raises.

        Raises:
            ClientQueueFullError: too many calls wait. ClientClosedError: the client is closed.
        """
        more = {**named_inputs, "parameters": parameters, "headers": headers}
        return self._submit(lambda client: client.infer_sample(*inputs, **more))

    def infer_batch(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Future[Arrays]:
        """Infer a batch; the future has what ``ModelClient.infer_batch`` returns or raises."""
        more = {**named_inputs, "parameters": parameters, "headers": headers}
        return self._submit(lambda client: client.infer_batch(*inputs, **more))

    def model_config(self) -> Future[ClientModelConfig]:
        """The model's configuration; the future has what ``ModelClient.model_config`` is or raises."""
        return self._submit(lambda client: client.model_config)

    def wait_for_model(self, timeout_s: float) -> Future[None]:
        """Wait for the model; the future has what ``ModelClient.wait_for_model`` raises."""
        return self._submit(lambda client: client.wait_for_model(timeout_s))

    def _submit(self, call: Callable[[ModelClient], Any]) -> Future[Any]:
        try:
            return self._pool.submit(lambda client: self._run(client, call), self._submit_timeout_s)
        except PoolFull:
            raise ClientQueueFullError("Queue is full") from None
        except PoolClosed:
            raise ClientClosedError(f"{type(self).__name__} is already closed") from None

    def _run(self, client: ModelClient, call: Callable[[ModelClient], Any]) -> Any:
        result = call(client)
        if self.known_config is None:
            self.known_config = client.known_config  # the threads to come need not ask again
        return result

    @contextlib.contextmanager
    def _client(self) -> Iterator[ModelClient]:
        """The client that one thread has for itself."""
        arguments = self.same_arguments()
        arguments["ensure_model_is_ready"] &= self._waits
        try:
            with ModelClient(**arguments) as client:
                yield client
        finally:
            if self.settings.url.protocol == HTTP:
                _leave_gevent()


def _leave_gevent() -> None:
    """End this thread's event loop of gevent, which would outlive the thread."""
    import gevent

    gevent.get_hub().destroy()


def _check_limit(name: str, limit: int | None) -> None:
    if limit is not None and limit <= 0:
        raise ValueError(f"{name} must be above 0, or None for no limit, got {limit}")
