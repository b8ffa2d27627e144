"""Stack dumps of all threads of this process for the process that started it, requested by a signal.

``STACKS_SIGNAL`` wakes a thread that writes the stacks while it holds the GIL, so no other thread changes its
frames meanwhile. ``FORCED_STACKS_SIGNAL`` has a handler in C, which also works while C code holds the GIL.
That handler reads the frames of threads that may be running, and can crash the process
(https://github.com/python/cpython/issues/116008), so the supervisor sends this signal only if the first one
had no answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from typing import Final

# No common library uses these two signals.
STACKS_SIGNAL: Final = signal.SIGRTMAX - 7
FORCED_STACKS_SIGNAL: Final = signal.SIGRTMAX - 8


def block_stacks_signal() -> None:
    """Block ``STACKS_SIGNAL`` in the calling thread and in threads started from now on. The kernel gives the
    signal to any thread that does not block the signal, and ends the process unless that thread waits for it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})


def show_on_signal(fd: int) -> None:
    """Write the stacks of all threads to ``fd``, an inherited descriptor, on each of the two signals."""
    os.set_inheritable(fd, False)
    block_stacks_signal()
    threading.Thread(target=_write_on_signal, args=(fd,), name="gpuserve-stacks", daemon=True).start()
    faulthandler.register(FORCED_STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def request_stacks(pid: int, pidfd: int, *, forced: bool = False) -> bool:
    """Request the stacks of a process by a signal. Return False if the process does not handle both signals,
    or not yet: either signal would end such a process.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            fields = dict(line.split(":", 1) for line in status)
        is_caught = bool(int(fields["SigCgt"], 16) >> (FORCED_STACKS_SIGNAL - 1) & 1)
        if is_caught:
            signal.pidfd_send_signal(pidfd, FORCED_STACKS_SIGNAL if forced else STACKS_SIGNAL)
    except (OSError, ValueError, KeyError):
        return False
    return is_caught


def block_forced_signal() -> None:
    """Block ``FORCED_STACKS_SIGNAL`` in the calling thread and in threads started from now on.

    Threads that exist already handle the signal, so it interrupts no system call of user code, and user code
    cannot wait for it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {FORCED_STACKS_SIGNAL})


def _write_on_signal(fd: int) -> None:
    while True:
        signal.sigwait({STACKS_SIGNAL})
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(file=fd, all_threads=True)
