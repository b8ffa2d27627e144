"""The clients' errors under PyTriton's names, and warnings that gpuserve's clients never give."""

from __future__ import annotations

from gpuserve.client.exceptions import ClientClosedError as PyTritonClientClosedError
from gpuserve.client.exceptions import ClientError as PyTritonClientError
from gpuserve.client.exceptions import ClientInferenceServerError as PyTritonClientInferenceServerError
from gpuserve.client.exceptions import ClientInvalidUrlError as PyTritonClientInvalidUrlError
from gpuserve.client.exceptions import (
    ClientModelDoesntSupportBatchingError as PyTritonClientModelDoesntSupportBatchingError,
)
from gpuserve.client.exceptions import ClientModelUnavailableError as PyTritonClientModelUnavailableError
from gpuserve.client.exceptions import ClientQueueFullError as PyTritonClientQueueFullError
from gpuserve.client.exceptions import ClientTimeoutError as PyTritonClientTimeoutError
from gpuserve.client.exceptions import ClientValueError as PyTritonClientValueError

__all__ = [
    "PyTritonClientClosedError", "PyTritonClientError", "PyTritonClientInferenceServerError",
    "PyTritonClientInvalidUrlError", "PyTritonClientModelDoesntSupportBatchingError",
    "PyTritonClientModelUnavailableError", "PyTritonClientQueueFullError", "PyTritonClientTimeoutError",
    "PyTritonClientValueError",
]  # fmt: skip


class PyTritonWarning(UserWarning):
    """The base class of PyTriton's warnings."""


class NotSupportedTimeoutWarning(PyTritonWarning):
    """A timeout that a client ignores. gpuserve's clients ignore none."""


# Logs and tracebacks of a program for PyTriton have PyTriton's names.
for _name in __all__:
    _error = globals()[_name]
    _error.__name__ = _error.__qualname__ = _name
    _error.__module__ = __name__
