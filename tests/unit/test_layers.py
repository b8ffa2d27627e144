"""Processes and packages that must start quickly import little. The layers are in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
#: Never in a worker that has not loaded user code, nor in what user code imports from us.
HEAVY = frozenset(
    {
        "aiohttp", "asyncio", "cloudpickle", "concurrent", "dataclasses", "google", "grpc", "http",
        "logging", "ml_dtypes", "multiprocessing", "prometheus_client", "rich", "ssl",
        "tritonclient", "typer", "uvloop", "yaml", "zmq",
    }
)  # fmt: skip
#: What a worker loads that numpy and it have not in common: 200 of them load it 200 times. ``socket`` and
#: ``numpy.typing`` would be a fortieth of their start.
BESIDE_NUMPY = frozenset(
    {
        "_bisect", "_socket", "array", "bisect", "cython_runtime", "errno", "faulthandler",
        "fcntl", "gc", "importlib._abc", "importlib.util", "mmap", "msgpack", "msgpack._cmsgpack",
        "msgpack.exceptions", "msgpack.ext", "select", "signal", "threading", "__future__",
    }
)  # fmt: skip


def is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def loaded_by(statement: str) -> set[str]:
    """The modules of a fresh interpreter after ``statement``."""
    program = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    command = [sys.executable, "-c", program]
    return {*subprocess.check_output(command, text=True, timeout=60, cwd=REPOSITORY).split()}


def heavy(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] in HEAVY}


def test_a_worker_is_light() -> None:
    modules = loaded_by("import gpuserve_worker.process")
    assert "numpy" in modules
    assert heavy(modules) == set()
    assert not any(is_below(name, "gpuserve") for name in modules)
    others = {name for name in modules if not is_below(name, "gpuserve_worker")}
    others -= loaded_by("import numpy") | BESIDE_NUMPY
    assert [name for name in others if not name.startswith("_cython_")] == []


def test_a_worker_has_imported_nothing_before_it_takes_care_of_its_start() -> None:
    modules = loaded_by("import gpuserve_worker.__main__")
    ours = {name for name in modules if is_below(name, "gpuserve_worker")}
    assert ours == {"gpuserve_worker", "gpuserve_worker.__main__"}


def test_what_user_code_imports_and_the_package_itself_are_light() -> None:
    modules = loaded_by("import gpuserve.decorators")
    assert heavy(modules) == set()
    ours = {name for name in modules if is_below(name, "gpuserve")}
    core = {"gpuserve.core", *(f"gpuserve.core.{one}" for one in ("lazy_names", "suggestions", "version"))}
    assert {name for name in ours if not is_below(name, "gpuserve.decorators")} == {"gpuserve"} | core
    modules = loaded_by("import gpuserve")
    assert heavy(modules) == set()
    assert "numpy" not in modules
