"""How far tests explore: everything in the thorough run, the most telling part of it in any other."""

from __future__ import annotations

import os
from typing import Any

import pytest


def examples(most: int) -> int:
    """``most`` where ``scripts/test_thorough`` runs, which sets the variable, and else a fifth of it."""
    return most if os.environ.get("THOROUGH_TESTS") else max(1, most // 5)


def variants(first: Any, *others: Any) -> list[Any]:
    """Values of a parameter that show the same by other means: the first always, the others when thorough."""
    return [first, *(pytest.param(other, marks=pytest.mark.thorough) for other in others)]
