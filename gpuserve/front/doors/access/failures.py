"""What a client is told of whatever went wrong. Both doors use it."""

from __future__ import annotations

import logging

from gpuserve.core.errors import Internal, RequestError

logger = logging.getLogger(__name__)


def error_to_tell(error: Exception, what: str) -> RequestError:
    """The error itself if it is a request's. Any other is a defect, met while ``what`` was done: it is
    logged, and a client hears nothing of it. The error loses its frames, which refer to the body.
    """
    if isinstance(error, RequestError):
        error.__context__ = error.__cause__ = None
        return error.with_traceback(None)
    logger.error("defect while %s", what[:256], exc_info=error)
    return Internal("internal error of the server")
