"""How what goes wrong in a call becomes its status on grpc.aio."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from gpuserve.errors import RequestError, Stopping
from gpuserve.front.doors.grpc.headers import RETRY_PUSHBACK
from gpuserve.front.v2.status import STATUS

logger = logging.getLogger(__name__)

_STATUS_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


async def abort(context: Any, error: RequestError) -> None:
    """End the call with the error as its status; raises grpc's own ``AbortError``."""
    trailers = (RETRY_PUSHBACK,) if isinstance(error, Stopping) else ()
    await context.abort(_STATUS_CODES[STATUS[error.code][1]], str(error), trailers)


@contextlib.asynccontextmanager
async def as_status(context: Any) -> AsyncIterator[None]:
    """Turn what goes wrong inside into the call's status."""
    try:
        yield
    except RequestError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        logger.exception("defect while serving a call")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error of the server")
