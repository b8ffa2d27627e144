"""What was rendered, written: below a folder, or to stdout. Nothing is replaced before all is on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuserve.config.problems import ConfigProblems, Origin, Problem
from gpuserve.core.errors import GpuserveError

if TYPE_CHECKING:
    from gpuserve.export.rendering import Files

#: Of a file that holds a token: for nobody else on this machine.
_SECRET_MODE: Final = 0o600
_USUAL_MODE: Final = 0o666
#: How one is told: a Secret, or the header with a token in a configuration of Envoy.
_SECRETS: Final = ("kind: Secret\n", "key: authorization\n")


def write(folder: str, files: Files) -> None:
    """Write every file below the folder, which is made; others stay. ConfigProblems: it cannot be written;
    then all is as before, unless a written file could not be renamed.
    """
    if not folder:
        raise _problem("expected a folder, given ''")
    staging = _Staging()
    try:
        for name, text in files.items():
            staging.add(Path(folder, name), text)
        staging.put()
    except OSError as error:
        raise _problem(f"{folder!r} cannot be written: {_reason(error)}") from None
    finally:
        staging.clear()


def to_stdout(text: str) -> None:
    """Write to stdout, for a pipe; GpuserveError: it cannot be written; BrokenPipeError: nobody reads it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - what is left is not for it
        raise GpuserveError(f"stdout cannot be written: {_reason(error)}") from None


class _Staging:
    """Files beside their places, which are theirs once all of them could be written."""

    def __init__(self) -> None:
        self._staged: list[tuple[Path, Path]] = []
        self._made: list[Path] = []

    def add(self, path: Path, text: str) -> None:
        self._make(path.parent)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, f"{path.name} is a directory")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._staged.append((temporary, path))
        is_secret = any(mark in text for mark in _SECRETS)
        temporary.touch(_SECRET_MODE if is_secret else _USUAL_MODE)
        temporary.write_text(text, encoding="utf-8")

    def put(self) -> None:
        for temporary, path in self._staged:
            temporary.replace(path)
        self._made.clear()

    def clear(self) -> None:
        """Remove files that were not moved, and the folders that were made for them."""
        for temporary, _ in self._staged:
            temporary.unlink(missing_ok=True)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _make(self, folder: Path) -> None:
        if folder.is_dir():
            return
        if folder.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        self._make(folder.parent)
        folder.mkdir()
        self._made.append(folder)


def _problem(text: str) -> ConfigProblems:
    return ConfigProblems([Problem("--out", text, Origin.FLAG)])


def _reason(error: OSError) -> str:
    return (error.strerror or "unknown reason").lower()
