"""A container without a root of its own: its folders lie below one of ours, and their names are rewritten."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.rollout.manifest import Container

#: What a server would take from the shell that started us.
_OURS: Final = "GPUSERVE_"
_HOST: Final = "GPUSERVE_SERVER__HOST"


@dataclass(frozen=True, slots=True)
class Laid:
    """How to start a container whose files are laid out."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path


def lay_out(container: Container, root: Path, address: str) -> Laid:
    """Write its files below ``root``. It listens on ``address`` alone, as a pod does in its own network."""
    for folder in container.empty_folders:
        _inside(root, folder).mkdir(parents=True, exist_ok=True)
    for path, content in container.files.items():
        file = _inside(root, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    folders = (*container.empty_folders, *{os.path.dirname(path) for path in container.files})
    working = _inside(root, container.working_folder)
    working.mkdir(parents=True, exist_ok=True)
    said = {name: _rewritten(value, root, folders) for name, value in container.environment.items()}
    base = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{base.get('PATH', os.defpath)}"
    return Laid(
        command=tuple(_rewritten(word, root, folders) for word in container.command),
        environment={**base, "PATH": path, **said, _HOST: address},
        folder=working,
    )


def _inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _rewritten(word: str, root: Path, folders: tuple[str, ...]) -> str:
    is_inside = any(word == folder or word.startswith(f"{folder}/") for folder in folders)
    return str(_inside(root, word)) if is_inside else word
