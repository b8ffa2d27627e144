"""How a process of ours shows the stacks of its threads to whoever started it: at a signal, into a file that
it was given. The handler is C and waits for nothing, so it works also while code that is not Python holds the
interpreter's lock. Who asks is ``gpuserve/supervisor/core/stacks.py``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Final

#: No common library uses this one. It has no handler but in processes that have called ``show_on_signal``.
STACKS_SIGNAL: Final = signal.SIGRTMAX - 7


def show_on_signal(fd: int) -> None:
    """Write the stacks of all threads to an inherited descriptor whenever the signal comes."""
    os.set_inheritable(fd, False)
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def leave_to_others() -> None:
    """Let the signal come to a thread that exists already. System calls of this one, and of those that it
    starts, are not interrupted by it; no code of the user's can have it wait there either.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})
