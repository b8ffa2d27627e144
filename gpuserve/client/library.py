"""The four kinds of tritonclient: how each is imported and made, and what it raises."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

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


def library(url: ServerUrl, *, aio: bool = False) -> Library:
    """The tritonclient for the protocol of ``url``: the blocking one, or that of asyncio."""
    options_of = _grpc if url.protocol == GRPC else _aiohttp if aio else _gevent
    try:
        options, errors = options_of()
        module = importlib.import_module(f"tritonclient.{url.protocol}{'.aio' if aio else ''}")
    except ImportError as error:
        if url.protocol == GRPC:
            raise
        raise ImportError(
            f"a client over HTTP needs more packages: pip install 'gpuserve[client]' ({error})"
        ) from error
    from tritonclient.utils import InferenceServerException

    def connect(url: ServerUrl, timeout_s: float) -> Any:
        return module.InferenceServerClient(url.address, ssl=url.tls, **options(url.tls, timeout_s))

    return Library(module, connect, (InferenceServerException, *errors), url.protocol == GRPC)


#: The options of a tritonclient, whether with TLS and with which timeout in seconds.
_Options: TypeAlias = Callable[[bool, float], dict[str, Any]]
#: Those, and what else it raises.
_Kind: TypeAlias = tuple[_Options, tuple[type[Exception], ...]]


def _grpc() -> _Kind:
    import grpc

    return lambda tls, timeout_s: {"channel_args": _CHANNEL_ARGS}, (grpc.RpcError,)


def _gevent() -> _Kind:
    import gevent.ssl
    from geventhttpclient.response import HTTPParseError

    def options(tls: bool, timeout_s: float) -> dict[str, Any]:
        context = gevent.ssl.create_default_context
        return {"connection_timeout": timeout_s, "network_timeout": timeout_s, "ssl_context_factory": context}

    return options, (OSError, HTTPParseError)


def _aiohttp() -> _Kind:
    import ssl

    import aiohttp

    def options(tls: bool, timeout_s: float) -> dict[str, Any]:
        context = ssl.create_default_context() if tls else None
        return {"conn_timeout": timeout_s, "conn_limit": 0, "ssl_context": context}

    return options, (OSError, aiohttp.ClientError)
