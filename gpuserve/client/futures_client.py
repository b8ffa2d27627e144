"""``FuturesModelClient``: inferences as futures, run by threads that have a ``ModelClient`` each.

``ResourcePool`` starts a thread when a call comes and no thread is free, up to a limit. A bounded queue holds
the calls that wait.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from gpuserve.client.client_base import AnyClient, Values
from gpuserve.client.client_config import ClientModelConfig
from gpuserve.client.client_settings import HTTP, ClientSettings, ServerUrl
from gpuserve.client.exceptions import ClientClosedError, ClientQueueFullError
from gpuserve.client.model_clients import ModelClient
from gpuserve.client.request_builder import Arrays
from gpuserve.core.suggestions import explained


class FuturesModelClient(AnyClient):
    """A client of one model for any number of threads, whose calls return ``concurrent.futures.Future``.

    Args:
        url, model_name, model_version, model_config, access_token: As for ``ModelClientBase``.
        init_timeout_s, inference_timeout_s, ensure_model_is_ready: As for ``ModelClientBase``.
        max_workers: Number of concurrent inferences, each on its own connection. None is no limit.
        max_queue_size: Number of calls that wait. None is no limit.
        non_blocking: Whether a call fails at once if the queue is full, and not after
            ``inference_timeout_s``.

    Raises:
        ClientValueError: if an argument is wrong. ValueError: if a limit is not above 0.
    """

    _client_class: ClassVar[type[ModelClient]] = ModelClient

    @explained
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
        self._limits: dict[str, Any] = {"max_workers": max_workers, "max_queue_size": max_queue_size}
        for name, limit in self._limits.items():
            if limit is not None and limit <= 0:
                raise ValueError(f"{name} must be above 0, or None for no limit, got {limit}")
        self.settings = ClientSettings.checked(
            url, model_name, model_version, init_timeout_s, inference_timeout_s, access_token
        )
        self.known_config = model_config
        self._waits = ensure_model_is_ready
        self._submit_timeout_s = 0.0 if non_blocking else self.settings.inference_timeout_s
        self._pool: ResourcePool[ModelClient] = ResourcePool(self._client, max_workers, max_queue_size)

    @classmethod
    def from_existing_client(cls, existing_client: AnyClient) -> Self:
        limits = existing_client._limits if isinstance(existing_client, FuturesModelClient) else {}
        return cls(**existing_client.same_arguments(), **limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self, wait: bool = True) -> None:
        """Accept no more calls. With ``wait``, return when all accepted calls are finished."""
        self._pool.close(wait)

    def infer_sample(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Future[Arrays]:
        """Infer one sample. The future has the result or the exception of ``ModelClient.infer_sample``.

        Raises:
            ClientQueueFullError: if too many calls wait. ClientClosedError: if the client is closed.
        """
        more = {**named_inputs, "parameters": parameters, "headers": headers}
        return self._submit(lambda client: client.infer_sample(*inputs, **more))

    def infer_batch(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Future[Arrays]:
        """Infer a batch, as ``infer_sample``."""
        more = {**named_inputs, "parameters": parameters, "headers": headers}
        return self._submit(lambda client: client.infer_batch(*inputs, **more))

    def model_config(self) -> Future[ClientModelConfig]:
        """Request the model's configuration, as ``ModelClient.model_config``."""
        return self._submit(lambda client: client.model_config)

    def wait_for_model(self, timeout_s: float) -> Future[None]:
        """Wait for the model. The future has the exception of ``ModelClient.wait_for_model``."""
        return self._submit(lambda client: client.wait_for_model(timeout_s))

    def _submit(self, call: Callable[[ModelClient], Any]) -> Future[Any]:
        def run(client: ModelClient) -> Any:
            result = call(client)
            if self.known_config is None:
                self.known_config = client.known_config  # new threads need not request it again
            return result

        return self._pool.submit(run, self._submit_timeout_s)

    @contextlib.contextmanager
    def _client(self) -> Iterator[ModelClient]:
        arguments = self.same_arguments()
        arguments["ensure_model_is_ready"] &= self._waits
        try:
            with self._client_class(**arguments) as client:
                yield client
        finally:
            if self.settings.url.protocol == HTTP:
                import gevent

                gevent.get_hub().destroy()  # this thread's event loop, which would outlive the thread


Resource = TypeVar("Resource")


class _PoolCall(NamedTuple):
    future: Future[Any]
    call: Callable[[Any], Any]

    def run(self, resource: Any, give_room_back: Callable[[], None]) -> None:
        if not self.future.set_running_or_notify_cancel():
            give_room_back()
            return
        try:
            result = self.call(resource)
        except BaseException as error:  # the caller of the future gets any exception
            give_room_back()
            self.future.set_exception(error)
        else:
            give_room_back()
            self.future.set_result(result)


class ResourcePool(Generic[Resource]):
    """Threads that run calls on up to ``max_threads`` resources, each made by ``open_resource`` in its
    thread. Up to ``max_waiting`` calls wait besides. None is no limit. One lock guards all state.

    A call gives its room back before its future is done, so that who saw the result finds the room.
    """

    def __init__(
        self,
        open_resource: Callable[[], contextlib.AbstractContextManager[Resource]],
        max_threads: int | None,
        max_waiting: int | None,
    ) -> None:
        self._open_resource = open_resource
        self._max_threads = max_threads
        self._max_unfinished = (
            None if max_threads is None or max_waiting is None else max_threads + max_waiting
        )
        self._lock = threading.Lock()
        self._call_added = threading.Condition(self._lock)
        self._room_freed = threading.Condition(self._lock)
        self._waiting: collections.deque[_PoolCall] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._unfinished = 0
        self._closed = False

    def submit(self, call: Callable[[Resource], Any], timeout_s: float) -> Future[Any]:
        """Run ``call`` in a thread. Wait ``timeout_s`` for room; raise ClientQueueFullError without any."""
        work = _PoolCall(Future(), call)
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self._try_assign(work):
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._room_freed.wait(remaining):
                    raise ClientQueueFullError("Queue is full")
        return work.future

    def close(self, wait: bool) -> None:
        """Accept no more calls. Waiting calls still run. With ``wait``, return when all have run."""
        with self._lock:
            self._closed = True
            self._call_added.notify_all()
            self._room_freed.notify_all()
            threads = list(self._threads)
        if wait:
            for thread in threads:
                thread.join()

    def _try_assign(self, work: _PoolCall) -> bool:
        """Assign a call to a free thread, a new thread or the queue. Return False if the queue is full."""
        if self._closed:
            raise ClientClosedError("FuturesModelClient is already closed")
        if self._max_unfinished is not None and self._unfinished >= self._max_unfinished:
            return False
        self._unfinished += 1
        every_thread_has_a_call = self._idle <= len(self._waiting)
        if every_thread_has_a_call and (self._max_threads is None or len(self._threads) < self._max_threads):
            thread = threading.Thread(target=self._run, args=(work,), name="gpuserve-client", daemon=True)
            self._threads.append(thread)
            thread.start()
        else:
            self._waiting.append(work)
            self._call_added.notify()
        return True

    def _run(self, first: _PoolCall) -> None:
        work: _PoolCall | None = first
        del first
        with self._open_resource() as resource:
            while work is not None:
                work.run(resource, self._give_room_back)
                work = None  # while this thread waits, only the caller references the result
                work = self._next_call()

    def _give_room_back(self) -> None:
        with self._lock:
            self._unfinished -= 1
            self._room_freed.notify()

    def _next_call(self) -> _PoolCall | None:
        with self._lock:
            self._idle += 1
            while not self._waiting and not self._closed:
                self._call_added.wait()
            self._idle -= 1
            return self._waiting.popleft() if self._waiting else None
