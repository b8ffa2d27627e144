"""The folder where environments that come packed are unpacked, and where what they are lent lies."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpuserve.environments.problem import EnvironmentProblem


def made_once(kind: str, identity: Any, make: Callable[[Path], None]) -> Path:
    """A folder that ``make`` fills, unless that was done for this ``identity`` before. Whoever comes while
    another process is at it waits. Raises ``EnvironmentProblem``, or what ``make`` does.
    """
    name = hashlib.sha256(repr(identity).encode()).hexdigest()[:24]
    root = _root()
    folder = root / kind / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _fill(folder, make)
    except OSError as error:
        raise EnvironmentProblem(
            f"{folder.parent} cannot be used as a cache ({error.strerror}): let XDG_CACHE_HOME name another"
        ) from error
    return folder


def _root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuserve" / "environments"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process that has it
        yield


def _fill(folder: Path, make: Callable[[Path], None]) -> None:
    """Nobody sees a folder that is half full, also not after a process was killed over it."""
    new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        make(new)
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
