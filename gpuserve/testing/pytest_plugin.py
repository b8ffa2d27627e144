"""The pytest fixtures for a project's models. pytest imports this file always, so imports are late."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from gpuserve.testing.testing_client import TestClient

_OPTION: Final = "gpuserve_target"
_MARKER: Final = "gpuserve"
_USAGE: Final = (
    "gpuserve(target, **options): the target of gpuserve_client and gpuserve_server, as for TestClient; a "
    "path is relative to the test's folder, a callable is given as target="
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        _OPTION,
        "The target of gpuserve_client and gpuserve_server: a config file, model.py:name, a repository; a "
        "path is relative to the folder of this file.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _USAGE)


def _open_clients() -> Iterator[Callable[..., TestClient]]:
    """Yield a function that opens the client of a target once, and close the clients at the end."""
    clients: dict[str, TestClient] = {}
    with ExitStack() as stack:

        def client_of(target: Any, **options: Any) -> TestClient:
            from gpuserve.testing.testing_client import TestClient

            key = repr((target, sorted(options.items())))
            if key not in clients:
                clients[key] = stack.enter_context(TestClient(target, **options))
            return clients[key]

        yield client_of


_gpuserve_of_session = pytest.fixture(scope="session")(_open_clients)
_gpuserve_of_module = pytest.fixture(scope="module")(_open_clients)


@pytest.fixture
def gpuserve_client(request: pytest.FixtureRequest) -> TestClient:
    """Return a ``TestClient`` whose models are in this process. The target is the marker ``gpuserve``, and
    the client lives for its module; or the setting ``gpuserve_target``, and the client lives for the session.
    """
    return _client(request, workers=False)


@pytest.fixture
def gpuserve_server(request: pytest.FixtureRequest) -> TestClient:
    """Return a ``TestClient`` with a server of its own, whose ``addresses`` any client can use."""
    return _client(request, workers=True)


def _client(request: pytest.FixtureRequest, *, workers: bool) -> TestClient:
    marker = request.node.get_closest_marker(_MARKER)
    if marker is not None:
        options = dict(marker.kwargs)
        targets = [*marker.args, *([options.pop("target")] if "target" in options else [])]
        if len(targets) != 1:
            pytest.fail(f"expected @pytest.mark.gpuserve(target), given {len(targets)} targets", False)
        open_client: Callable[..., TestClient] = request.getfixturevalue("_gpuserve_of_module")
        return open_client(_relative_target(targets[0], request.path.parent), workers=workers, **options)
    target = request.config.getini(_OPTION)
    if not target:
        pytest.fail(
            f"{request.fixturename} has no target: mark the test with "
            f"@pytest.mark.gpuserve(target), or set {_OPTION} in the configuration of pytest",
            False,
        )
    open_client = request.getfixturevalue("_gpuserve_of_session")
    return open_client(_relative_target(target, request.config.rootpath), workers=workers)


def _relative_target(target: Any, folder: os.PathLike[str]) -> Any:
    """Return the target, with a path relative to a folder. Names of packages are unchanged."""
    if not isinstance(target, str):
        return target
    place, colon, attribute = target.partition(":")
    path = os.path.join(folder, place)
    return f"{path}{colon}{attribute}" if os.path.exists(path) else target
