"""gpuserve's errors as PyTriton's: the one table, applied at the edge of ``Triton``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gpuserve import errors
from gpuserve.compat.pytriton.exceptions import (
    PyTritonBadParameterError,
    PyTritonInvalidOperationError,
    PyTritonRuntimeError,
    PyTritonUnrecoverableError,
    PyTritonValidationError,
)

#: The first that fits counts.
TABLE: Final[tuple[tuple[type[errors.GpuserveError], type[Exception]], ...]] = (
    (errors.DuplicateModel, PyTritonInvalidOperationError),
    (errors.BadModelConfig, PyTritonBadParameterError),
    (errors.BindError, PyTritonValidationError),
    (errors.ConfigError, PyTritonValidationError),
    (errors.ModelUnrecoverable, PyTritonUnrecoverableError),
    (errors.AttachError, TimeoutError),
    (errors.GpuserveError, PyTritonRuntimeError),
)


def translated(error: errors.GpuserveError) -> Exception:
    """The same as one of PyTriton's; the text stays."""
    return next(theirs for ours, theirs in TABLE if isinstance(error, ours))(str(error))


@contextmanager
def pytriton_errors() -> Iterator[None]:
    """What is raised inside by gpuserve is raised as PyTriton's."""
    try:
        yield
    except errors.GpuserveError as error:
        raise translated(error) from error.__cause__  # what made it one of ours says nothing more
