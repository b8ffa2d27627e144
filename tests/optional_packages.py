"""Packages that may be absent where the tests run, such as PyTorch: its wheels on PyPI take gigabytes."""

from __future__ import annotations

import importlib.util

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test unless all ``packages`` are installed."""
    missing = [one for one in packages if importlib.util.find_spec(one) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
