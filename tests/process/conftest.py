"""Fixtures of the tests with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from operated import Orders


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    """Orders to the models of a test: one folder for each test."""
    return Orders(tmp_path / "orders")
