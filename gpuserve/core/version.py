"""The version of this package, for everything that tells it."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
