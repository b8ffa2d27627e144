"""The four kinds of tritonclient: how each is imported and made, and what it raises. Nothing is called here
but constructors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from gpuserve.client.url import GRPC, ServerUrl

_INT32_MAX: Final = 2**31 - 1
#: A server that comes back, or whose name appears, is found within a second; grpc's own limit is minutes.
_CHANNEL_ARGS: Final = [
    ("grpc.max_send_message_length", _INT32_MAX),
    ("grpc.max_receive_message_length", _INT32_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
]


class Library(NamedTuple):
    """One kind of tritonclient.

    ``module`` has InferInput; ``connect`` makes the client of a server, whose calls
    have the timeout in seconds where they take none of their own; ``errors`` is what calls raise when they
    fail, and not when they are wrong.
    """

    module: Any
    connect: Callable[[ServerUrl, float], Any]
    errors: tuple[type[Exception], ...]
    timeout_a_call: bool


def library(url: ServerUrl) -> Library:
    """The blocking tritonclient for the protocol of ``url``."""
    return _grpc() if url.protocol == GRPC else _http()


def aio_library(url: ServerUrl) -> Library:
    """The tritonclient of asyncio for the protocol of ``url``."""
    return _grpc_aio() if url.protocol == GRPC else _http_aio()


def _grpc() -> Library:
    import tritonclient.grpc as module
    from tritonclient.utils import InferenceServerException

    def connect(url: ServerUrl, timeout_s: float) -> Any:
        return module.InferenceServerClient(url.address, ssl=url.tls, channel_args=_CHANNEL_ARGS)

    return Library(module, connect, (InferenceServerException,), True)


def _grpc_aio() -> Library:
    import grpc
    import tritonclient.grpc.aio as module
    from tritonclient.utils import InferenceServerException

    def connect(url: ServerUrl, timeout_s: float) -> Any:
        return module.InferenceServerClient(url.address, ssl=url.tls, channel_args=_CHANNEL_ARGS)

    return Library(module, connect, (InferenceServerException, grpc.RpcError), True)


def _http() -> Library:
    try:
        import gevent.ssl
        import tritonclient.http as module
        from geventhttpclient.response import HTTPParseError
    except ImportError as error:
        raise _missing(error) from error
    from tritonclient.utils import InferenceServerException

    def connect(url: ServerUrl, timeout_s: float) -> Any:
        return module.InferenceServerClient(
            url.address,
            connection_timeout=timeout_s,
            network_timeout=timeout_s,
            ssl=url.tls,
            ssl_context_factory=gevent.ssl.create_default_context,
        )

    return Library(module, connect, (InferenceServerException, OSError, HTTPParseError), False)


def _http_aio() -> Library:
    try:
        import aiohttp
        import tritonclient.http.aio as module
    except ImportError as error:
        raise _missing(error) from error
    import ssl

    from tritonclient.utils import InferenceServerException

    def connect(url: ServerUrl, timeout_s: float) -> Any:
        context = ssl.create_default_context() if url.tls else None
        return module.InferenceServerClient(
            url.address, conn_timeout=timeout_s, conn_limit=0, ssl=url.tls, ssl_context=context
        )

    return Library(module, connect, (InferenceServerException, OSError, aiohttp.ClientError), False)


def _missing(error: ImportError) -> ImportError:
    return ImportError(f"a client over HTTP needs more packages: pip install 'gpuserve[client]' ({error})")
