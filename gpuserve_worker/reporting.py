"""What a worker tells its supervisor while it works. One small class over the boot socket."""

from __future__ import annotations

from typing import Final

from gpuserve_worker.link import Link
from gpuserve_worker.wire import Log, Phase, Unrecoverable

#: ``logging.INFO`` and so on; the module itself is not needed here.
_INFO: Final = 20
_WARNING: Final = 30
_ERROR: Final = 40


class Report:
    """The way to the supervisor's log and to its decisions."""

    def __init__(self, boot: Link) -> None:
        self._boot = boot

    def phase(self, name: str) -> None:
        """What is being done before the model is ready.

        Raises:
            OSError: the supervisor is gone.
        """
        self._boot.send(Phase(name))

    def log(self, level: int, text: str, traceback: str) -> None:
        """A record, which is dropped rather than let inference wait for a log."""
        self._boot.try_send(Log(level, text, traceback))

    def error(self, text: str) -> None:
        """A record of level ERROR."""
        self.log(_ERROR, text, "")

    def warning(self, text: str, traceback: str = "") -> None:
        """A record of level WARNING."""
        self.log(_WARNING, text, traceback)

    def info(self, text: str) -> None:
        """A record of level INFO."""
        self.log(_INFO, text, "")

    def unrecoverable(self, text: str) -> None:
        """No further inference is possible here.

        Raises:
            OSError: the supervisor is gone.
        """
        self._boot.send(Unrecoverable(text))
