"""What was rendered, written: below a folder, or to stdout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpuserve.config.messages import ConfigProblems, Origin, Problem

if TYPE_CHECKING:
    from gpuserve.export.rendering import Files


def write(folder: str, files: Files) -> None:
    """Every file below the folder, which is made. Other files there stay as they are.

    Raises:
        ConfigProblems: it cannot be written.
    """
    try:
        for name, text in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        text = f"{folder!r} cannot be written: {(error.strerror or 'unknown reason').lower()}"
        raise ConfigProblems([Problem("--out", text, Origin.FLAG)]) from None
