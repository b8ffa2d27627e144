"""Where this checkout is, and what of it the check serves."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
MODELS: Final = Path(__file__).resolve().parent / "models"
