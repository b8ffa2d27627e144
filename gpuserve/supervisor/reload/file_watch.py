"""Hears of changes in folders from the kernel, by watchfiles: not what has changed, only that something has.
What that is, a look at the files says (``polling.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

logger = logging.getLogger(__name__)

#: Changes are told together: this long after the last of them, and at the latest so long after the first.
_QUIET_MS: Final = 50
_LATEST_MS: Final = 400
#: What changed while a watch was set up is seen within this time.
_WAKE_MS: Final = 500


class FileWatch:
    """A thread for the folders that were named last. Owner of it, and of those that end: ``close()`` leaves
    none.
    """

    def __init__(self) -> None:
        self._wake: Callable[[], object] = lambda: None
        #: Each with its inode: one that was made again is another.
        self._folders: frozenset[tuple[str, int]] = frozenset()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        #: The kernel cannot watch here; the files have to be looked at every so often.
        self.has_failed = False

    def open(self, wake: Callable[[], object]) -> None:
        """Call ``wake``, in a thread, after each change in a folder."""
        self._wake = wake

    def watch(self, folders: Collection[str]) -> None:
        """Watch these folders, not those in them, in place of the earlier ones."""
        wanted = frozenset(_found(folders))
        if wanted == self._folders:
            return
        self._stop.set()  # it ends by itself
        self._folders, self._stop = wanted, threading.Event()
        arguments = (sorted(path for path, _ in wanted), self._stop)
        thread = threading.Thread(target=self._run, args=arguments, name="gpuserve-watch", daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._folders = frozenset()

    def _run(self, folders: list[str], stop: threading.Event) -> None:
        from watchfiles import watch  # only a server that follows files has use for it

        changes = watch(
            *folders,
            watch_filter=None,
            recursive=False,
            debounce=_LATEST_MS,
            step=_QUIET_MS,
            rust_timeout=_WAKE_MS,
            yield_on_timeout=True,
            stop_event=stop,
            raise_interrupt=False,
        )
        is_first = True
        try:
            for change in changes:
                if change or is_first:  # what changed before the folders were watched is seen now
                    self._wake()
                is_first = False
        except (OSError, RuntimeError) as error:  # watchfiles has one of its own for what it does not know
            self.has_failed = True
            logger.warning("folders cannot be watched, and are looked at every second instead: %s", error)
            self._wake()


def _found(folders: Iterable[str]) -> Iterator[tuple[str, int]]:
    """The folders that are there, with their inodes."""
    for path in folders:
        with contextlib.suppress(OSError):
            found = os.stat(path)
            if stat.S_ISDIR(found.st_mode):
                yield os.path.realpath(path), found.st_ino
