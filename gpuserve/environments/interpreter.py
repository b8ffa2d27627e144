"""The interpreter that a path stands for: it itself, that of a folder, or that of a packed folder."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any, Final

from gpuserve.environments.cache import made_once
from gpuserve.environments.problem import EnvironmentProblem

_EXPECTED: Final = "an interpreter, a folder with bin/python in it, or a .tar.gz of such a folder"
_IN_FOLDER: Final = "bin/python"


def interpreter_of(path: str) -> str:
    """The interpreter of an environment, which is unpacked where it has to be, once.

    Raises:
        EnvironmentProblem: there is none.
    """
    place = Path(os.path.abspath(path))
    if place.is_dir():
        return _in_folder(place, path)
    if not place.is_file():
        raise EnvironmentProblem(f"the Python environment {path!r} does not exist: expected {_EXPECTED}")
    if os.access(place, os.X_OK) and not tarfile.is_tarfile(place):
        return str(place)
    return _in_folder(_unpacked(place), path)


def _in_folder(folder: Path, path: str) -> str:
    interpreter = folder / _IN_FOLDER
    if not os.access(interpreter, os.X_OK):
        raise EnvironmentProblem(
            f"the Python environment {path!r} has no {_IN_FOLDER} that can be run: expected {_EXPECTED}"
        )
    return str(interpreter)


def _unpacked(archive: Path) -> Path:
    """The folder of an archive; another version of it has another."""
    status = archive.stat()

    def unpack(folder: Path) -> None:
        # Links of an environment lead out of it: to the interpreter that it was made with.
        as_tar: Any = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
        try:
            with tarfile.open(archive) as opened:
                # The archive is an interpreter that the operator names: the server runs it anyway.
                opened.extractall(folder, **as_tar)  # nosec B202
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise EnvironmentProblem(
                f"the Python environment {str(archive)!r} cannot be unpacked ({error}): expected {_EXPECTED}"
            ) from error

    return made_once("unpacked", (str(archive), status.st_mtime_ns, status.st_size), unpack)
