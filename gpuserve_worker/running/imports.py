"""Which files of the user's a worker has imported, told to the supervisor of a server that follows files:
after the load, and again when a call imports more. What lies in the standard library, in site-packages or
here is not the user's.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable
from typing import Final

from gpuserve_worker.running.supervision import Reporter

#: An import is told of after this time, together with those that it brings.
SETTLE_S: Final = 0.2
#: A message is one datagram; nobody writes so many files by hand.
MOST_FILES: Final = 500
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_SCHEME: Final = ("stdlib", "platstdlib", "purelib", "platlib")
_PACKAGES: Final = ("gpuserve", "gpuserve_worker")


class ImportWatch:
    """Sits in front of Python's finders, finds nothing itself, and so sees every import that is new."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._begun = threading.Event()
        self._told: tuple[str, ...] = ()

    def start(self) -> None:
        """Tell of what is imported by now, and from now on of what comes."""
        self._tell()
        sys.meta_path.insert(0, self)
        threading.Thread(target=self._follow, name="gpuserve-imports", daemon=True).start()

    def find_spec(self, _name: str, _path: object = None, _target: object = None) -> None:
        self._begun.set()

    def tell_failed(self, error: BaseException) -> None:
        """Tell of what a load imported before it failed, and of what it failed in."""
        self._tell(_files_of(error))

    def _tell(self, more: Iterable[str] = ()) -> None:
        files = tuple(user_files([*_module_files(), *more]))[:MOST_FILES]
        if files != self._told:
            self._told = files
            self._reporter.imported(files)

    def _follow(self) -> None:
        pause = threading.Event()
        while self._begun.wait():
            pause.wait(SETTLE_S)
            self._begun.clear()
            try:
                self._tell()
            except OSError:  # the supervisor is gone, and this process with it
                return


def user_files(files: Iterable[str]) -> list[str]:
    """Return those of the files that are there and nobody's but the user's, each once, in order."""
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    roots = {os.path.join(own, one) for one in _PACKAGES} | {sysconfig.get_path(one) for one in _SCHEME}
    prefixes = tuple(f"{root}{os.sep}" for root in roots if root)
    found = {os.path.abspath(one) for one in files if one.endswith((".py", ".so"))}
    return sorted(
        one
        for one in found
        if not one.startswith(prefixes) and _INSTALLED.isdisjoint(one.split(os.sep)) and os.path.isfile(one)
    )


def _files_of(error: BaseException | None) -> list[str]:
    """Return the files that an error came through: a module whose import fails is no module afterwards."""
    found: list[str] = []
    while error is not None:
        if isinstance(error, SyntaxError) and error.filename:
            found.append(error.filename)
        frames = error.__traceback__
        while frames is not None:
            found.append(frames.tb_frame.f_code.co_filename)
            frames = frames.tb_next
        error = error.__cause__ or error.__context__
    return found


def _module_files() -> list[str]:
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return [one for one in files if isinstance(one, str)]
