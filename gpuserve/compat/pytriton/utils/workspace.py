"""``Workspace``: a directory that PyTriton keeps its files in. gpuserve keeps none, so it is only a name."""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
from pathlib import Path


class CleanupWarning(UserWarning):
    """A workspace could not be removed."""


class Workspace:
    """The name of a directory. Nothing is ever written to it, nor is it made."""

    def __init__(self, workspace_path: str | Path | None = None) -> None:
        given = workspace_path
        self._path = pytriton_home() / f"workspace_{uuid.uuid4().hex}" if given is None else Path(given)

    @property
    def path(self) -> Path:
        """The absolute path of the workspace's directory."""
        return self._path.absolute()

    @property
    def model_store_path(self) -> Path:
        """The path of a model store in the workspace; gpuserve makes none."""
        return self.path / "model-store"

    def exists(self) -> bool:
        """Whether the directory is there."""
        return self.path.exists()

    def is_empty(self) -> bool:
        """Whether the directory has no entries, or is not there."""
        return not self.exists() or not any(self.path.iterdir())

    def clean(self) -> None:
        """Remove it, if it is there; what cannot be removed is a ``CleanupWarning``."""
        if not self.exists():
            return
        try:
            shutil.rmtree(self.path)
        except OSError as error:
            warnings.warn(
                f"Could not remove the workspace {self.path}: {error}", CleanupWarning, stacklevel=2
            )


def pytriton_home() -> Path:
    """Where workspaces are: ``$PYTRITON_HOME``, or ``pytriton`` in the user's cache directory."""
    home = os.environ.get("PYTRITON_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) if home else Path(cache, "pytriton")
