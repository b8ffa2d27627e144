"""PyTriton's utilities, as far as programs use them."""

from __future__ import annotations

import logging
import os
import shutil
import uuid
import warnings
from pathlib import Path
from typing import Final

#: Loggers of ``sh`` that write much at DEBUG.
_VERBOSE_LOGGERS: Final = ("sh.command", "sh.stream_bufferer", "sh.streamreader")


def silence_3rd_party_loggers() -> None:
    """Set the loggers of verbose libraries to WARNING."""
    for name in _VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


class CleanupWarning(UserWarning):
    """The warning that a workspace could not be removed."""


class Workspace:
    """The name of the folder of PyTriton's files. gpuserve neither creates it nor writes to it."""

    def __init__(self, workspace_path: str | Path | None = None) -> None:
        given = workspace_path
        self._path = pytriton_home() / f"workspace_{uuid.uuid4().hex}" if given is None else Path(given)

    @property
    def path(self) -> Path:
        return self._path.absolute()

    @property
    def model_store_path(self) -> Path:
        """The path of a model store in the workspace. gpuserve creates none."""
        return self.path / "model-store"

    def exists(self) -> bool:
        return self.path.exists()

    def is_empty(self) -> bool:
        """Return whether the folder has no entries, or does not exist."""
        return not self.exists() or not any(self.path.iterdir())

    def clean(self) -> None:
        """Remove the folder, if it exists. Warn by ``CleanupWarning`` if the folder cannot be removed."""
        if not self.exists():
            return
        try:
            shutil.rmtree(self.path)
        except OSError as error:
            warnings.warn(
                f"Could not remove the workspace {self.path}: {error}", CleanupWarning, stacklevel=2
            )


def pytriton_home() -> Path:
    """Return the folder of workspaces: ``$PYTRITON_HOME``, or ``pytriton`` in the user's cache folder."""
    home = os.environ.get("PYTRITON_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) if home else Path(cache, "pytriton")
