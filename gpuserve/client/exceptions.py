"""The clients' exceptions, and the conversion of errors of tritonclient and of connections to them."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.core.errors import GpuserveError


class ClientError(GpuserveError):
    """The base class of the clients' errors. ``message`` is the text."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ClientValueError(ClientError):
    """A wrong argument. Nothing was sent."""


class ClientInvalidUrlError(ClientValueError):
    """A URL that names no reachable server."""


class ClientEncodingError(ClientValueError, RuntimeError):
    """An array of text that is not encoded to bytes."""


class ClientTimeoutError(ClientError):
    """A time-out: no answer in time, or no server."""


class ClientModelUnavailableError(ClientTimeoutError):
    """The end of the wait for a model that the answering server does not have."""


class ClientClosedError(ClientError):
    """The use of a client after ``close()``."""


class ClientModelDoesntSupportBatchingError(ClientError):
    """A call of ``infer_batch`` for a model that does not batch."""


class ClientInferenceServerError(ClientError):
    """A request that the server refused, or a failure of the model."""


class ClientQueueFullError(ClientError):
    """A full queue: no more calls may wait in the client."""


_DEADLINE: Final = frozenset({"StatusCode.DEADLINE_EXCEEDED", "504"})
_NOT_FOUND: Final = frozenset({"StatusCode.NOT_FOUND", "404"})
_RESTRICTED: Final = "is restricted, expecting header"


def inference_error(error: Exception, timeout_s: float | None) -> ClientError:
    """Return the error of a failed inference. A connection that failed or broke counts as a time-out."""
    if isinstance(error, OSError) or status(error) in _DEADLINE:
        limit = "" if timeout_s is None else f" Timeout: {timeout_s} s."
        return ClientTimeoutError(
            f"Timeout occurred during inference request.{limit} Message: {error_text(error)}"
        )
    return ClientInferenceServerError(
        f"Error occurred during inference request. Message: {error_text(error)}"
    )


def server_not_ready(error: Exception | None) -> ClientError:
    return ClientTimeoutError("Waiting for server to be ready timed out." + _message(error))


def model_not_ready(shown: str, error: Exception | None) -> ClientError:
    if error is not None and (status(error) in _NOT_FOUND or "unknown model" in error_text(error)):
        return ClientModelUnavailableError(
            f"Model {shown} is unavailable: the server has no such model. Message: {error_text(error)}"
        )
    return ClientTimeoutError(f"Waiting for model {shown} to be ready timed out." + _message(error))


def is_access_refused(error: Exception) -> bool:
    """Return whether the server refuses the access token, so that waiting is useless."""
    return _RESTRICTED in error_text(error)


def status(error: Exception) -> str | None:
    """Return the HTTP status, or gRPC's as "StatusCode.NAME", or None without an answer."""
    found: Any = getattr(error, "status", None) or getattr(error, "code", None)
    if not callable(found):
        return None
    value = found()
    return None if value is None else str(value)


def error_text(error: Exception) -> str:
    """Return the message of the server, or of the connection."""
    for name in ("message", "details"):
        method = getattr(error, name, None)
        if callable(method) and (words := method()):
            return str(words)
    return str(error) or type(error).__name__


def _message(error: Exception | None) -> str:
    return "" if error is None else f" Message: {error_text(error)}"
