"""Fixtures of the tests with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bound import free_server
from operated import Orders

from gpuserve import Server


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    """Orders to the models of a test: one folder for each test."""
    return Orders(tmp_path / "orders")


@pytest.fixture(scope="module")
def bare_server() -> Iterator[Server]:
    """A server in this program whose tests leave it without models."""
    with free_server() as server:
        server.run()
        yield server
