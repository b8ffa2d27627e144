"""A worker's talk with its supervisor over the boot socket: what it tells (``Reporter``), and what it is told
while it lives (``Supervision``).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Final

from gpuserve_worker.calling.request_ids import current_request_ids
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.wire import Imported, Log, Phase, Stop, Unrecoverable
from gpuserve_worker.running.lifecycle import EXIT_FAILED, EXIT_STOPPED

#: ``logging.INFO`` and so on; the module itself is not needed here.
_INFO: Final = 20
_WARNING: Final = 30
_ERROR: Final = 40


class Reporter:
    """Tells the supervisor how the worker fares, and writes to its log."""

    def __init__(self, boot: Link) -> None:
        self._boot = boot

    def phase(self, name: str) -> None:
        """Say what is done before the model is ready. Raises ``OSError`` where the supervisor is gone."""
        self._boot.send(Phase(name))

    def imported(self, files: tuple[str, ...]) -> None:
        """Say which files of the user's are imported. Raises ``OSError`` where the supervisor is gone."""
        self._boot.send(Imported(files))

    # A log record is dropped rather than let inference wait for the log.

    def log(self, level: int, text: str) -> None:
        self._boot.try_send(Log(level, text, "", current_request_ids()))

    def error(self, text: str, traceback: str = "") -> None:
        self._boot.try_send(Log(_ERROR, text, traceback, current_request_ids()))

    def warning(self, text: str, traceback: str = "") -> None:
        self._boot.try_send(Log(_WARNING, text, traceback, current_request_ids()))

    def info(self, text: str) -> None:
        self.log(_INFO, text)

    def unrecoverable(self, text: str) -> None:
        """Say that no further inference is possible here. Raises ``OSError`` where the supervisor is gone."""
        self._boot.send(Unrecoverable(text))


class Supervision:
    """The supervisor's word during the life of the process. ``on_stop`` is what ``Stop`` does: to exit, until
    a loop is there to finish its batch, since user code that loads cannot be interrupted in any other way.
    """

    def __init__(self, boot: Link) -> None:
        self._boot = boot
        self.on_stop: Callable[[], None] = functools.partial(os._exit, EXIT_STOPPED)

    def start(self) -> None:
        """Listen in a thread, which is the only one that receives from now on."""
        threading.Thread(target=self._listen, name="gpuserve-supervision", daemon=True).start()

    def _listen(self) -> None:
        try:
            while (received := self._boot.receive()) is not None:
                if isinstance(received[0], Stop):
                    self.on_stop()
        finally:
            # Also when this thread itself falls over: a worker that cannot be stopped must not stay.
            os._exit(EXIT_FAILED)
