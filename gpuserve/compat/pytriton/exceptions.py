"""PyTriton's errors, and the conversion of gpuserve's errors to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gpuserve import errors
from gpuserve_worker.inference.failure import UnrecoverableError


class PyTritonError(Exception):
    """The base class of PyTriton's errors. ``message`` is the text."""

    def __init__(self, message: object) -> None:
        super().__init__(message)

    @property
    def message(self) -> str:
        return str(self)


class PyTritonValidationError(PyTritonError):
    """An argument with a value that cannot be served."""


class PyTritonInvalidOperationError(PyTritonError):
    """An operation that is impossible in the present state."""


class PyTritonBadParameterError(PyTritonError):
    """An invalid value in a model's configuration."""


class PyTritonModelConfigError(PyTritonError):
    """A model configuration that cannot be read or written."""


class PyTritonUnrecoverableError(PyTritonError, UnrecoverableError):
    """The end of all inference: raised by inference callables, and by ``serve()`` in return."""


class PyTritonRuntimeError(PyTritonError):
    """A failure of the server, or of a decorator, at run time."""


#: gpuserve's errors and PyTriton's. The first match counts.
ERROR_TABLE: Final[tuple[tuple[type[errors.GpuserveError], type[Exception]], ...]] = (
    (errors.DuplicateModel, PyTritonInvalidOperationError),
    (errors.BadModelConfig, PyTritonBadParameterError),
    (errors.BindError, PyTritonValidationError),
    (errors.ConfigError, PyTritonValidationError),
    (errors.ModelUnrecoverable, PyTritonUnrecoverableError),
    (errors.AttachError, TimeoutError),
    (errors.GpuserveError, PyTritonRuntimeError),
)


@contextmanager
def pytriton_errors() -> Iterator[None]:
    """Convert errors of gpuserve that are raised inside the block."""
    try:
        yield
    except errors.GpuserveError as error:
        kind = next(theirs for ours, theirs in ERROR_TABLE if isinstance(error, ours))
        raise kind(str(error)) from error.__cause__  # our own error adds nothing to the cause
