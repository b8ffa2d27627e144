"""Names of the code that pictures say. A name that is not there any more stops the drawing, so that no
picture says what is not so.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Final

from gpuserve.config.settings.server import ServerSettings

REPOSITORY: Final = Path(__file__).resolve().parents[3]


def message(module: str, name: str) -> str:
    """Give the name of a message, which its module must have."""
    if not isinstance(getattr(importlib.import_module(module), name, None), type):
        raise LookupError(f"{module} has no message {name}")
    return name


def program(module: str) -> str:
    """Give the command of a process: its module must be one that runs."""
    if importlib.util.find_spec(f"{module}.__main__") is None:
        raise LookupError(f"python -m {module} runs nothing")
    return f"python -m {module}"


def file(path: str) -> str:
    """Give the path of a file of the front without that folder, or of the worker with its package."""
    for folder in ("gpuserve/front", ""):
        if (REPOSITORY / folder / path).is_file():
            return path
    raise LookupError(f"{path} is not there any more")


def port(name: str) -> str:
    """Give the default of a port with a colon."""
    return f":{getattr(ServerSettings(), name)}"
