"""What an import of gpuserve costs, and that the public names are there."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest

HEAVY = {"grpc", "zmq", "numpy", "asyncio", "cloudpickle", "rich", "tritonclient", "typer"}
PUBLIC = ["gpuserve", "gpuserve.client", "gpuserve.decorators"]


def loaded_by(statement: str) -> set[str]:
    """The packages of a fresh interpreter after ``statement``."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "statement",
    [
        "import gpuserve",
        "from gpuserve import Server",
        "from gpuserve import *",
        "from gpuserve import Server, Tensor; Server().bind('m', len, [], [Tensor((1,), 'FP32')], "
        "isolation='thread')",
    ],
)
def test_imports_are_light(statement: str) -> None:
    assert not loaded_by(statement) & HEAVY


def test_importing_the_package_imports_its_version_and_nothing_else_of_it() -> None:
    program = "import gpuserve, sys; print(*(name for name in sys.modules if 'gpuserve' in name))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if not name.startswith("__editable__")}
    assert ours == {"gpuserve", "gpuserve.core", "gpuserve.core.lazy_names", "gpuserve.core.version"}


def test_user_code_pays_for_numpy_and_no_more() -> None:
    loaded = loaded_by("from gpuserve.decorators import batch")
    assert "numpy" in loaded
    assert not loaded & (HEAVY - {"numpy"})


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_resolves_and_is_listed(module: str) -> None:
    loaded = importlib.import_module(module)
    names = loaded.__all__
    assert list(names) == sorted(names)
    assert all(getattr(loaded, name) is not None for name in names)
    assert set(names) <= set(dir(loaded))
    own = {
        name
        for name, value in vars(loaded).items()
        if isinstance(value, type | types.FunctionType)
        and value.__module__ == module
        and not name.startswith("_")
    }
    assert own <= set(names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import gpuserve

    with pytest.raises(AttributeError, match="module 'gpuserve' has no attribute 'Sever'"):
        gpuserve.Sever  # noqa: B018


def test_a_worker_without_a_gpu_imports_nothing_of_one() -> None:
    program = (
        "import sys, types, gpuserve_worker.process; from gpuserve_worker import loading as devices\n"
        "devices.open_path(types.SimpleNamespace(device='cpu', array='numpy'), None)\n"
        "print(devices.is_unusable('cpu'), *(one for one in sys.modules if 'cuda' in one or 'cupy' in one))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
