"""By which ids the requests are known that a callable runs now, where the server keeps an access log.
Coroutines and the threads of ``asyncio.to_thread`` inherit them.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

_IDS: Final[ContextVar[tuple[str, ...]]] = ContextVar("gpuserve_request_ids", default=())


def enter_requests(ids: tuple[str, ...]) -> None:
    """Let what is called from here on run for these requests."""
    _IDS.set(ids)


def current_request_ids() -> tuple[str, ...]:
    """The ids of the requests of the batch that runs here, in order, "" for one without; () where no server
    keeps an access log, or where nothing runs.
    """
    return _IDS.get()
