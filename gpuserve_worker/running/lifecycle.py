"""What a worker process owes its surroundings: when it ends, what its children inherit, its name. It ends
when the supervisor says ``Stop`` (the batch at hand is finished), the boot socket closes or the parent dies
(at once), or when its own code falls over. User code may change signal handlers, the current directory and
the standard streams; nothing here depends on them after ``prepare_process``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import signal
import sys
from contextlib import suppress
from typing import Final, NoReturn

from gpuserve_worker.protocol.link import Link

EXIT_STOPPED: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
#: The device cannot be used by this process: a successor may be able to, this one never will.
EXIT_DEVICE: Final = 3
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_TITLE_NBYTES: Final = 15


def prepare_process() -> None:
    """Tie this process to its parent and set up signals and streams, before any user code."""
    die_with_parent()
    # Ctrl-C and SIGHUP are the supervisor's to act on. A user's handler may replace these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.stderr is not None:
        faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def die_with_parent() -> None:
    """SIGKILL when the parent dies, even while user code holds the GIL in C. A parent that is pid 1 is usual
    in a container, so only a change tells that it died meanwhile; if it had died before, the boot socket is
    at its end and nothing is loaded.
    """
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


def set_title(title: str) -> None:
    _prctl(_PR_SET_NAME, ctypes.c_char_p(title.encode()[:_TITLE_NBYTES]))


def _prctl(option: int, argument: ctypes.c_char_p | int) -> None:
    value = argument if isinstance(argument, ctypes.c_char_p) else ctypes.c_ulong(argument)
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def leave(status: int) -> NoReturn:
    """End the process at once, but for what it has yet to print: libraries of a lost device would wait for
    it, or abort.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may be the user's own by now
            stream.flush()
    os._exit(status)


def keep_from_children(*links: Link) -> None:
    """Close the links in a child that user code forks: one that never execs would keep the peer from seeing
    the worker's end, and could send in its name.
    """
    for link in links:
        os.register_at_fork(after_in_child=link.close)
