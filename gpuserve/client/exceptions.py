"""What the clients raise."""

from __future__ import annotations

from gpuserve.core.errors import GpuserveError


class ClientError(GpuserveError):
    """Whatever a client raises on purpose. ``message`` is its text."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ClientValueError(ClientError):
    """An argument is wrong; nothing was sent."""


class ClientInvalidUrlError(ClientValueError):
    """The URL names no server that a client could reach."""


class ClientEncodingError(ClientValueError, RuntimeError):
    """An array holds text that is not encoded to bytes."""


class ClientTimeoutError(ClientError):
    """No answer came in time, or there was no server to give one."""


class ClientModelUnavailableError(ClientTimeoutError):
    """The wait for a model ended, and the server answers but has no such model."""


class ClientClosedError(ClientError):
    """The client was used after ``close()``."""


class ClientModelDoesntSupportBatchingError(ClientError):
    """``infer_batch`` on a model that does not batch."""


class ClientInferenceServerError(ClientError):
    """The server refused the request, or the model failed."""


class ClientQueueFullError(ClientError):
    """As many calls wait as the client may hold."""
