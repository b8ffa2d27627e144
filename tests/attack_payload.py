"""What an attack in a pickle does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Payload:
    """An object whose unpickling creates a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)
