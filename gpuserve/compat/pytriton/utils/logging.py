"""The log of other libraries that a program may use beside this one."""

from __future__ import annotations

import logging
from typing import Final

#: Of ``sh``, each of which says a lot at the level DEBUG.
_TALKATIVE: Final = ("sh.command", "sh.stream_bufferer", "sh.streamreader")


def silence_3rd_party_loggers() -> None:
    """Have libraries that say much at DEBUG say only warnings."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
