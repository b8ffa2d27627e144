"""How far properties are explored: all examples in the thorough run, a third of them in any other."""

from __future__ import annotations

import os


def examples(most: int) -> int:
    """``most`` where ``scripts/test_thorough`` runs, which sets the variable, and else a third of it."""
    return most if os.environ.get("THOROUGH_TESTS") else most // 3
