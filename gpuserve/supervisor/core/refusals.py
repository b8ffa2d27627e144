"""What becomes of an unexpected exception while something is being changed: the change is refused, and the
traceback is logged. The reactor keeps serving (``Supervisor`` gives it ``on_error``).
"""

from __future__ import annotations

import errno
import logging
from typing import Final

from gpuserve.errors import GpuserveError, Internal, RequestError, Unavailable

logger = logging.getLogger(__name__)

#: Something that the machine or a limit of this process does not have at the moment.
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC})
_SHOWN_CHARACTERS: Final = 200


def refuse_change(change: str, error: Exception) -> RequestError:
    """Return the error that refuses a change because of an exception, and log the traceback of an exception
    that is none of ours.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, GpuserveError):
        return Internal(str(error))
    logger.error("%s failed: %s", change, _reason(error), exc_info=error)
    if is_exhaustion(error):
        return Unavailable(f"{change} failed: {_reason(error)}; another try may succeed")
    return Internal(f"{change} failed: {_reason(error)}; the log of the server has the traceback")


def is_exhaustion(error: Exception) -> bool:
    """Return whether memory, descriptors, threads or processes were lacking."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno in _EXHAUSTED)
        or (isinstance(error, RuntimeError) and "can't start new thread" in str(error))
    )


def _reason(error: Exception) -> str:
    """Describe an exception to a client, without the paths of an OSError."""
    text = (error.strerror or "") if isinstance(error, OSError) else str(error)
    return f"{type(error).__name__}: {text[:_SHOWN_CHARACTERS]}" if text else type(error).__name__
