"""A server that follows files and cannot start, because of what a file says, is started again when it says
something else.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

from gpuserve.cli.console.failures import exit_code_of, tell
from gpuserve.config.fingerprints import folders_in, package_folders, shallow_fingerprint
from gpuserve.config.problems import ConfigProblems, Origin
from gpuserve.config.settings import logs
from gpuserve.core.errors import GpuserveError, ModelLoadError

if TYPE_CHECKING:
    from gpuserve.supervisor.processes.child_process import EarlyFront

#: What is looked at as it was before the server began to start.
Stamps: TypeAlias = Mapping[str, Hashable]
#: What has changed before it was watched is seen within this time.
_LOOK_MS: Final = 500
#: From one look to the next where nothing can be watched.
_UNWATCHED_S: Final = 1.0


def serve_until_it_can(
    serve: Callable[[EarlyFront | None], int], early: EarlyFront | None, targets: Sequence[str]
) -> int:
    """Serve, and return the exit status. GpuserveError: it cannot be served, whatever files may say. Nobody
    writes byte code meanwhile: it would be taken for that of a file which is changed within its second.
    """
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    while True:
        before = _stamps(targets)
        try:
            return serve(early)
        except (ConfigProblems, ModelLoadError) as error:
            if not _may_be_mended(error, targets):
                raise
            tell(error)
            status = exit_code_of(error)
        ended = _told_by_signals()
        logs.write("Waiting for a change of the files; Ctrl-C ends.\n")
        if not _has_changed(targets, before, ended):
            return status


def _may_be_mended(error: GpuserveError, targets: Sequence[str]) -> bool:
    """Whether what is wrong is in a file, of a target that is there, and not in a flag."""
    is_flag = isinstance(error, ConfigProblems) and any(
        one.origin is Origin.FLAG and one.label not in targets for one in error.problems
    )
    return not is_flag and all(map(os.path.exists, map(_file_of, targets)))


def _file_of(target: str) -> str:
    """The file or folder of a target, the current folder for a module."""
    place = target if os.path.exists(target) else target.rpartition(":")[0]
    return place if os.path.exists(place) or place.endswith(".py") or not place else "."


def _told_by_signals() -> threading.Event:
    """Let signals say that nobody waits any more."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    return ended


def _has_changed(targets: Sequence[str], before: Stamps, ended: threading.Event) -> bool:
    """Wait until something in the targets, or beside them, is not as before; False: a signal ends it."""
    from watchfiles import watch  # only a server that follows files has use for it

    changes = watch(
        *sorted(_folders(targets)),
        debounce=400,
        step=50,
        rust_timeout=_LOOK_MS,
        yield_on_timeout=True,
        recursive=False,
        stop_event=ended,
        raise_interrupt=False,
    )
    with suppress(OSError, RuntimeError):  # there are no more watches to be had
        return any(_stamps(targets) != before for _ in changes)
    while not ended.wait(_UNWATCHED_S):
        if _stamps(targets) != before:
            return True
    return False


def _stamps(targets: Sequence[str]) -> Stamps:
    return {one: shallow_fingerprint(one) for one in _folders(targets)}


def _folders(targets: Sequence[str]) -> set[str]:
    found = {os.getcwd()}
    for path in map(os.path.abspath, map(_file_of, targets)):
        found.update(folders_in(path) if os.path.isdir(path) else [os.path.dirname(path)])
    return found.union(*map(package_folders, found))
