"""The plugin of pytest: fixtures for the models that a project serves. pytest imports this file in every run
of a Python where gpuserve is installed, so that nothing is imported here that a test may not need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from gpuserve.testing.client import TestClient

_OPTION: Final = "gpuserve_target"
_MARKER: Final = "gpuserve"
_USAGE: Final = (
    "gpuserve(target, **options): what gpuserve_client and gpuserve_server ask, as TestClient takes it; a "
    "path begins at the test's folder, a callable is given as target="
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        _OPTION,
        "What gpuserve_client and gpuserve_server ask: a config file, model.py:name, a repository; a path "
        "begins at the folder of this file.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _USAGE)


class OpenClients:
    """The clients that tests have asked for, opened once each and closed together."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._clients: dict[str, TestClient] = {}

    def get(self, target: Any, *, workers: bool, **options: Any) -> TestClient:
        """The client of a target. Raises as ``TestClient`` and its ``open``."""
        from gpuserve.testing.client import TestClient

        key = repr((target, workers, sorted(options.items())))
        if key not in self._clients:
            client = TestClient(target, workers=workers, **options)
            self._clients[key] = self._stack.enter_context(client)
        return self._clients[key]

    def close(self) -> None:
        self._clients.clear()
        self._stack.close()


@pytest.fixture(scope="session")
def _gpuserve_of_session() -> Iterator[OpenClients]:
    yield from _open_clients()


@pytest.fixture(scope="module")
def _gpuserve_of_module() -> Iterator[OpenClients]:
    yield from _open_clients()


@pytest.fixture
def gpuserve_client(request: pytest.FixtureRequest) -> TestClient:
    """A ``TestClient`` whose models are in this process: those of the marker ``gpuserve``, kept for its
    module, or of the setting ``gpuserve_target``, kept for the session.
    """
    return _client(request, workers=False)


@pytest.fixture
def gpuserve_server(request: pytest.FixtureRequest) -> TestClient:
    """The same with a server of their own, whose ``addresses`` are for any client."""
    return _client(request, workers=True)


def _open_clients() -> Iterator[OpenClients]:
    clients = OpenClients()
    yield clients
    clients.close()


def _client(request: pytest.FixtureRequest, *, workers: bool) -> TestClient:
    marker = request.node.get_closest_marker(_MARKER)
    if marker is not None:
        options = dict(marker.kwargs)
        targets = [*marker.args, *([options.pop("target")] if "target" in options else [])]
        if len(targets) != 1:
            pytest.fail(f"expected @pytest.mark.gpuserve(target), given {len(targets)} targets", False)
        opened: OpenClients = request.getfixturevalue("_gpuserve_of_module")
        return opened.get(_from(targets[0], request.path.parent), workers=workers, **options)
    target = request.config.getini(_OPTION)
    if not target:
        pytest.fail(
            f"{request.fixturename} does not know what to ask: mark the test with "
            f"@pytest.mark.gpuserve(target), or set {_OPTION} in the configuration of pytest",
            False,
        )
    opened = request.getfixturevalue("_gpuserve_of_session")
    return opened.get(_from(target, request.config.rootpath), workers=workers)


def _from(target: Any, folder: os.PathLike[str]) -> Any:
    """The target, a path from a folder; names of packages stay what they are."""
    if not isinstance(target, str):
        return target
    place, colon, attribute = target.partition(":")
    path = os.path.join(folder, place)
    return f"{path}{colon}{attribute}" if os.path.exists(path) else target
