"""The log settings that clients can read and change while the server runs. Pure; ``logs.py`` applies them."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

#: What the front and the supervisor call these settings between them.
LOG: Final = "log"
DEFAULT: Final = "default"
ISO8601: Final = "ISO8601"


class LogSettings(NamedTuple):
    """What is logged. The names are the protocol's; critical records are always logged.

    ``log_verbose_level`` above 0 lets debug records through; ``log_format`` is the form of the time in text
    lines: "default" or "ISO8601".
    """

    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int
    log_format: str

    @classmethod
    def of_level(cls, log_level: str, log_format: str = DEFAULT) -> LogSettings:
        """What ``log_level`` ("debug", "info", "warning", "error") stands for."""
        least = logging.getLevelNamesMapping()[log_level.upper()]
        return cls(
            log_info=least <= logging.INFO,
            log_warning=least <= logging.WARNING,
            log_error=True,
            log_verbose_level=int(least <= logging.DEBUG),
            log_format=log_format,
        )

    @property
    def level(self) -> int:
        """The least severe level of ``logging`` that may be let through."""
        levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
        return next((level for level in levels if self.lets_through(level)), logging.CRITICAL)

    def lets_through(self, level: int) -> bool:
        switches = (
            (logging.CRITICAL, True),
            (logging.ERROR, self.log_error),
            (logging.WARNING, self.log_warning),
            (logging.INFO, self.log_info),
        )
        return next((on for least, on in switches if level >= least), self.log_verbose_level > 0)
