"""Imports go one way, and what must stay light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
#: Never in a worker that has not loaded user code, nor in what user code imports from us.
HEAVY = frozenset(
    {
        "aiohttp", "asyncio", "cloudpickle", "concurrent", "dataclasses", "google", "grpc", "h2corn", "http",
        "logging", "ml_dtypes", "multiprocessing", "prometheus_client", "pydantic", "rich", "ruamel", "ssl",
        "tritonclient", "typer", "uvloop", "zmq",
    }
)  # fmt: skip
#: A file or folder -> modules that nothing below it may import. A folder may always import its own.
FORBIDDEN = {
    "gpuserve_worker": {"gpuserve", "grpc", "zmq", "multiprocessing", "logging"},
    "gpuserve/decorators": {"gpuserve", "asyncio", "logging", "dataclasses"},
    "gpuserve/errors.py": {"gpuserve", "grpc", "asyncio", "numpy"},
    "gpuserve/model.py": {"gpuserve.front", "gpuserve.supervisor", "gpuserve.cli", "gpuserve.config", "grpc"},
    "gpuserve/spec.py": {"gpuserve.front", "gpuserve.supervisor", "gpuserve.cli", "gpuserve.config", "grpc"},
    "gpuserve/settings.py": {"gpuserve", "gpuserve_worker"},
    "gpuserve/front": {
        "gpuserve.supervisor.supervisor", "gpuserve.cli", "gpuserve.config", "gpuserve.server", "cloudpickle",
        "pickle",
    },
    "gpuserve/front/endpoint": {"gpuserve.front.scheduler.batcher", "h2corn"},
    "gpuserve/front/gpu_health": {"cupy", "pynvml", "gpuserve.front.endpoint", "gpuserve.front.scheduler"},
    "gpuserve/front/gpu_health/health.py": {"asyncio", "time", "threading"},
    "gpuserve/front/gpu_health/fleet.py": {"asyncio", "time", "threading"},
    "gpuserve/front/scheduler/batcher.py": {
        "asyncio", "time", "socket", "threading", "os", "grpc", "gpuserve_worker",
    },
    "gpuserve/front/scheduler/former.py": {
        "asyncio", "time", "socket", "threading", "os", "grpc", "gpuserve_worker",
    },
    "gpuserve/front/scheduler/devices.py": {
        "asyncio", "time", "socket", "threading", "os", "grpc", "gpuserve_worker",
    },
    "gpuserve/supervisor": {
        "gpuserve.front.endpoint", "gpuserve.front.scheduler", "gpuserve.cli", "gpuserve.config", "pickle",
        "asyncio",
    },
    "gpuserve/compat": {"gpuserve.cli", "gpuserve.config", "gpuserve.supervisor", "gpuserve.front.scheduler"},
    "gpuserve/compat/pytriton/decorators.py": {
        "gpuserve.front", "gpuserve.server", "gpuserve.model_host", "asyncio", "dataclasses", "logging",
    },
    "gpuserve/client": {"gpuserve.front", "gpuserve.supervisor", "gpuserve.cli", "gpuserve.config"},
    "gpuserve/config": {"gpuserve.front", "gpuserve.supervisor", "gpuserve.cli", "grpc"},
    "gpuserve/bench": {
        "gpuserve.front", "gpuserve.supervisor", "gpuserve.cli", "gpuserve.config", "gpuserve.server",
    },
    "gpuserve/bench/load.py": {"asyncio", "time", "socket", "threading", "os", "grpc", "hdrh"},
    "gpuserve/export": {
        "gpuserve.front", "gpuserve.supervisor", "gpuserve.cli", "grpc", "subprocess", "socket", "cupy",
        "pynvml",
    },
    "gpuserve/tune/search.py": {"gpuserve", "time", "random", "subprocess"},
}  # fmt: skip


def imports(file: Path) -> Iterator[str]:
    """Every module that a file names in an import, wherever in the file; not those for type checkers."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports are not used here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("place", FORBIDDEN)
def test_imports_go_one_way(place: str) -> None:
    path = REPOSITORY / place
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    own = place.replace("/", ".")
    wrong = [
        f"{file.relative_to(REPOSITORY)} imports {module}"
        for file in files
        for module in imports(file)
        if any(is_below(module, forbidden) for forbidden in FORBIDDEN[place]) and not is_below(module, own)
    ]
    assert wrong == []


def loaded_by(statement: str) -> set[str]:
    """The modules of a fresh interpreter after ``statement``."""
    program = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=REPOSITORY,
    )
    return set(done.stdout.split())


def heavy(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] in HEAVY}


def test_a_worker_is_light() -> None:
    modules = loaded_by("import gpuserve_worker.__main__")
    assert "numpy" in modules
    assert heavy(modules) == set()
    assert not any(is_below(name, "gpuserve") for name in modules)


def test_what_user_code_imports_is_light() -> None:
    modules = loaded_by("import gpuserve.decorators")
    assert heavy(modules) == set()
    ours = {name for name in modules if is_below(name, "gpuserve")}
    assert {name for name in ours if not is_below(name, "gpuserve.decorators")} == {"gpuserve"}


def test_the_package_itself_imports_nothing() -> None:
    modules = loaded_by("import gpuserve")
    assert heavy(modules) == set()
    assert "numpy" not in modules
