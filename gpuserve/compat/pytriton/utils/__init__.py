"""PyTriton's utilities, as far as programs use them."""

from __future__ import annotations

import logging
from typing import Final

#: Loggers of ``sh`` that write much at DEBUG.
_VERBOSE_LOGGERS: Final = ("sh.command", "sh.stream_bufferer", "sh.streamreader")


def silence_3rd_party_loggers() -> None:
    """Set the loggers of verbose libraries to WARNING."""
    for name in _VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
