"""What calls cost a process: time in the driver, which works on one call at a time, and the interpreter's
lock, which cupy keeps during many of its calls. Nothing costs anything unless the machine says so.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, Final

_US_PER_S: Final = 1e6
#: Calls of its functions keep the interpreter's lock.
_keeping: Any = ctypes.PyDLL(None)


class DriverTime:
    """The time of the driver in this process. A call that is short by itself waits behind a long one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0

    def spend(self, seconds: float, *, keeps_lock: bool) -> None:
        """Wait for the driver, and keep it so long. With ``keeps_lock`` no other thread runs meanwhile."""
        if not seconds and not self._free_at:
            return
        with self._lock:
            now = time.monotonic()
            until = max(now, self._free_at) + seconds
            self._free_at = until if seconds or until > now else 0.0
        if keeps_lock:
            self.keep_lock(until - now)
        else:
            time.sleep(until - now)

    def keep_lock(self, seconds: float) -> None:
        """Sleep with the interpreter's lock."""
        _keeping.usleep(round(seconds * _US_PER_S))
