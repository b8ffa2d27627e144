"""PyTriton's errors. ``translation.py`` says which of gpuserve's become which of these.

::

    PyTritonError
    ├── PyTritonValidationError
    ├── PyTritonInvalidOperationError
    ├── PyTritonBadParameterError
    ├── PyTritonModelConfigError
    ├── PyTritonUnrecoverableError     also gpuserve's UnrecoverableError: workers know it
    └── PyTritonRuntimeError
"""

from __future__ import annotations

from gpuserve_worker.calling.failure import UnrecoverableError


class PyTritonError(Exception):
    """What all of them have in common; ``message`` is the text."""

    def __init__(self, message: object) -> None:
        super().__init__(message)
        self._message = message

    def __str__(self) -> str:
        return str(self._message)

    @property
    def message(self) -> str:
        """What went wrong, in a sentence."""
        return str(self._message)


class PyTritonValidationError(PyTritonError):
    """An argument has a value that cannot be served."""


class PyTritonInvalidOperationError(PyTritonError):
    """What was asked for cannot be done now."""


class PyTritonBadParameterError(PyTritonError):
    """A value of a model's configuration cannot be."""


class PyTritonModelConfigError(PyTritonError):
    """A model's configuration cannot be read or written."""


class PyTritonUnrecoverableError(PyTritonError, UnrecoverableError):
    """No further inference is possible: raised by inference callables, and by ``serve()`` for one."""


class PyTritonRuntimeError(PyTritonError):
    """The server, or a decorator, failed while it ran."""
