"""Services that all parts of a server share: ``ServerCore``, background threads, refusals of changes."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from gpuserve.core.errors import GpuserveError, Internal, RequestError, Unavailable
from gpuserve.core.event_log import EventLog
from gpuserve.devices.mps import MpsDaemon
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.processes.child_supervision import LogLines
from gpuserve.supervisor.processes.front_monitor import FrontMonitor
from gpuserve.supervisor.processes.lifecycle import LiveSettings, ServerLifecycle, ServerState
from gpuserve.supervisor.processes.listeners import Listeners

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerCore:
    """The shared objects of one server. Only ``supervisor.py`` makes one."""

    lifecycle: ServerLifecycle
    settings: LiveSettings
    reactor: Reactor
    listeners: Listeners
    front: FrontMonitor
    events: EventLog
    lines: LogLines
    mps: MpsDaemon = field(default_factory=MpsDaemon)


_Result = TypeVar("_Result")


class BackgroundThreads:
    """Background threads for slow calls. The result of a call is dropped if the server has ended."""

    def __init__(self, core: ServerCore) -> None:
        self._core = core

    def run(self, call: Callable[[], _Result], then: Callable[[_Result | GpuserveError], None]) -> None:
        """Call in a thread, and ``then`` in the reactor's with the result, or the error that prevented it."""
        try:
            threading.Thread(
                target=self._run, args=(call, then), name="gpuserve-background", daemon=True
            ).start()
        except (RuntimeError, MemoryError) as error:
            refusal = refuse_change("the change", error)
            self._core.reactor.call_later(0.0, lambda: self._deliver(then, refusal))

    def _run(self, call: Callable[[], _Result], then: Callable[[_Result | GpuserveError], None]) -> None:
        result: _Result | GpuserveError
        try:
            result = call()
        except GpuserveError as error:
            result = error
        except Exception as error:
            result = refuse_change("the change", error)
        self._core.reactor.call_soon_threadsafe(partial(self._deliver, then, result))

    def _deliver(
        self, then: Callable[[_Result | GpuserveError], None], result: _Result | GpuserveError
    ) -> None:
        if self._core.lifecycle.state is not ServerState.STOPPED:
            then(result)


#: Error numbers of resources that the machine or a limit of this process lacks at the moment.
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC})
_SHOWN_CHARACTERS: Final = 200


def refuse_change(change: str, error: Exception) -> RequestError:
    """Return the error that refuses a change because of an exception. Log unexpected exceptions."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, GpuserveError):
        return Internal(str(error))
    logger.error("%s failed: %s", change, _reason(error), exc_info=error)
    if is_exhaustion(error):
        return Unavailable(f"{change} failed: {_reason(error)}; another try may succeed")
    return Internal(f"{change} failed: {_reason(error)}; the log of the server has the traceback")


def is_exhaustion(error: Exception) -> bool:
    """Return whether an exception means that memory, descriptors, threads or processes were lacking."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno in _EXHAUSTED)
        or (isinstance(error, RuntimeError) and "can't start new thread" in str(error))
    )


def _reason(error: Exception) -> str:
    """Return the text of an exception for a client, without the paths of an OSError."""
    text = (error.strerror or "") if isinstance(error, OSError) else str(error)
    return f"{type(error).__name__}: {text[:_SHOWN_CHARACTERS]}" if text else type(error).__name__
