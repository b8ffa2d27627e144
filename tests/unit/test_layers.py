"""Imports go one way, and what must stay light stays light."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
PACKAGES = ("gpuserve", "gpuserve_worker")
#: Never in a worker that has not loaded user code, nor in what user code imports from us.
HEAVY = frozenset(
    {
        "aiohttp", "asyncio", "cloudpickle", "concurrent", "dataclasses", "google", "grpc", "http",
        "logging", "ml_dtypes", "multiprocessing", "prometheus_client", "rich", "ruamel", "ssl",
        "tritonclient", "typer", "uvloop", "zmq",
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
#: A folder -> the folders that its files may import from, every one of them, also for type checkers only.
ALLOWED = {
    "gpuserve":
        "gpuserve/api gpuserve/cli gpuserve/model gpuserve/follow gpuserve/config/settings "
        "gpuserve_worker/inference",
    "gpuserve/api":
        "gpuserve/control gpuserve/model gpuserve/model/describe gpuserve/devices gpuserve/display "
        "gpuserve/errors gpuserve/model/options gpuserve/placement gpuserve/config/settings gpuserve/supervisor "
        "gpuserve/supervisor/attach gpuserve/supervisor/core gpuserve_worker/inference "
        "gpuserve_worker/protocol",
    "gpuserve/bench": "gpuserve/bench/calls gpuserve/bench/plan gpuserve/bench/reports gpuserve/bench/server",
    "gpuserve/bench/calls": "gpuserve/bench/plan",
    "gpuserve/bench/plan": "gpuserve/errors",
    "gpuserve/bench/reports": "gpuserve/bench/calls gpuserve/bench/plan gpuserve/bench/server",
    "gpuserve/bench/server":
        "gpuserve/bench/calls gpuserve/bench/plan gpuserve/client gpuserve_worker/protocol",
    "gpuserve/cli":
        "gpuserve/cli/console gpuserve/cli/verbs gpuserve/errors gpuserve/config/settings gpuserve/supervisor/core",
    "gpuserve/cli/console":
        "gpuserve/cli/views gpuserve/config gpuserve/config/entries gpuserve/control gpuserve/errors "
        "gpuserve/follow gpuserve/model/options gpuserve/placement gpuserve/config/triton gpuserve/config/settings "
        "gpuserve/config/fingerprints gpuserve/supervisor gpuserve/supervisor/core gpuserve/supervisor/models "
        "gpuserve/supervisor/reload",
    "gpuserve/cli/doctor":
        "gpuserve/cli/views gpuserve/control gpuserve/placement gpuserve/config/settings gpuserve_worker/memory",
    "gpuserve/cli/top":
        "gpuserve/cli/console gpuserve/cli/views gpuserve/control gpuserve/errors gpuserve/follow "
        "gpuserve/journal gpuserve/core/states",
    "gpuserve/cli/verbs":
        "gpuserve/bench gpuserve/bench/calls gpuserve/bench/plan gpuserve/bench/reports "
        "gpuserve/bench/server gpuserve/cli/console gpuserve/cli/doctor gpuserve/cli/top gpuserve/cli/views "
        "gpuserve/compat/pytriton gpuserve/compat/tritonserver gpuserve/config gpuserve/control "
        "gpuserve/model gpuserve/errors gpuserve/export gpuserve/export/sizing gpuserve/follow "
        "gpuserve/journal gpuserve/placement gpuserve/cli/new gpuserve/config/triton gpuserve/config/settings "
        "gpuserve/supervisor/core gpuserve/bench/tune gpuserve_worker/protocol",
    "gpuserve/cli/views":
        "gpuserve/config gpuserve/model gpuserve/devices gpuserve/placement gpuserve/config/settings "
        "gpuserve/supervisor/core gpuserve_worker/protocol gpuserve_worker/execution",
    "gpuserve/client": "gpuserve/model gpuserve/display gpuserve/errors gpuserve_worker/protocol",
    "gpuserve/compat": "gpuserve/compat/pytriton",
    "gpuserve/compat/importable/pytriton": "gpuserve/compat/pytriton",
    "gpuserve/compat/pytriton":
        "gpuserve/api gpuserve/client gpuserve/compat/pytriton/check gpuserve/compat/pytriton/client "
        "gpuserve/compat/pytriton/utils gpuserve/compat/tritonserver gpuserve/model gpuserve/decorators "
        "gpuserve/errors gpuserve/config/settings gpuserve_worker/inference",
    "gpuserve/compat/pytriton/client": "gpuserve/client",
    "gpuserve/compat/pytriton/model_config":
        "gpuserve/client gpuserve/compat/pytriton gpuserve/model gpuserve/errors gpuserve/front/requests "
        "gpuserve_worker/inference gpuserve_worker/protocol",
    "gpuserve/compat/pytriton/proxy": "gpuserve/compat/pytriton gpuserve_worker/inference",
    "gpuserve/compat/tritonserver": "gpuserve/model/options gpuserve/config/settings",
    "gpuserve/config":
        "gpuserve/config/entries gpuserve/model gpuserve/model/describe gpuserve/devices gpuserve/errors "
        "gpuserve/model/options gpuserve/backends gpuserve/config/settings gpuserve/config/fingerprints gpuserve_worker/protocol",
    "gpuserve/config/entries":
        "gpuserve/model gpuserve/devices gpuserve/errors gpuserve/model/options gpuserve/backends "
        "gpuserve_worker/protocol",
    "gpuserve/control": "gpuserve/errors gpuserve/journal gpuserve_worker/protocol",
    "gpuserve/model":
        "gpuserve/devices gpuserve/errors gpuserve/model/options gpuserve/config/settings gpuserve_worker/protocol",
    "gpuserve/decorators": "gpuserve_worker/inference gpuserve_worker/protocol",
    "gpuserve/model/describe":
        "gpuserve/model gpuserve/decorators gpuserve/environments gpuserve/errors gpuserve/config/settings "
        "gpuserve/typed gpuserve_worker/inference gpuserve_worker/protocol gpuserve_worker/execution",
    "gpuserve/devices": "gpuserve/errors",
    "gpuserve/environments": "gpuserve_worker/protocol gpuserve_worker/execution",
    "gpuserve/errors": "gpuserve_worker/inference",
    "gpuserve/export":
        "gpuserve/config gpuserve/devices gpuserve/errors gpuserve/export/envoy gpuserve/export/manifests "
        "gpuserve/export/sizing gpuserve/export/templates gpuserve/config/settings",
    "gpuserve/export/envoy":
        "gpuserve/config gpuserve/export/manifests gpuserve/export/sizing gpuserve/export/templates "
        "gpuserve/config/settings",
    "gpuserve/export/manifests":
        "gpuserve/config gpuserve/export/sizing gpuserve/export/templates gpuserve/config/settings",
    "gpuserve/export/sizing":
        "gpuserve/config gpuserve/config/entries gpuserve/model gpuserve/devices gpuserve/backends "
        "gpuserve/config/settings gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/export/templates": "gpuserve/export/sizing",
    "gpuserve/follow": "gpuserve/control gpuserve/errors gpuserve/journal",
    "gpuserve/front":
        "gpuserve/front/net gpuserve/front/process gpuserve/config/settings gpuserve_worker/protocol",
    "gpuserve/front/scheduling":
        "gpuserve/model gpuserve/devices gpuserve/errors gpuserve/front/scheduling gpuserve/front/requests "
        "gpuserve/config/settings gpuserve/core/states",
    "gpuserve/front/ingress":
        "gpuserve/control gpuserve/front gpuserve/front/doors gpuserve/front/net gpuserve/front/ipc "
        "gpuserve/front/observability gpuserve/front/ingress gpuserve/front/ingress gpuserve/front/net "
        "gpuserve/config/settings gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/front/doors":
        "gpuserve/errors gpuserve/front/protocols/access gpuserve/front/protocols/grpc gpuserve/front/protocols/http "
        "gpuserve/front/protocols/openai_api gpuserve/front/net gpuserve/front/observability/live gpuserve/front/observability "
        "gpuserve/front/service gpuserve/config/settings",
    "gpuserve/front/protocols/access":
        "gpuserve/errors gpuserve/front/net gpuserve/front/ipc gpuserve/front/requests gpuserve/config/settings",
    "gpuserve/front/protocols/grpc":
        "gpuserve/errors gpuserve/front/protocols/access gpuserve/front/net gpuserve/front/ipc "
        "gpuserve/front/models gpuserve/front/observability/tracing gpuserve/front/service gpuserve/front/requests "
        "gpuserve/config/settings gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/front/protocols/grpcio":
        "gpuserve/front/protocols/access gpuserve/front/protocols/grpc gpuserve/front/net gpuserve/config/settings",
    "gpuserve/front/protocols/health_port":
        "gpuserve/errors gpuserve/front/protocols/access gpuserve/front/protocols/grpc gpuserve/front/protocols/http "
        "gpuserve/front/net gpuserve/front/net gpuserve/front/service gpuserve/front/requests "
        "gpuserve_worker/protocol",
    "gpuserve/front/protocols/http":
        "gpuserve/control gpuserve/model gpuserve/errors gpuserve/front/protocols/access "
        "gpuserve/front/protocols/http/dashboard_page gpuserve/front/protocols/http/docs_page "
        "gpuserve/front/protocols/openapi gpuserve/front/net gpuserve/front/observability/live gpuserve/front/ipc "
        "gpuserve/front/models gpuserve/front/observability/tracing gpuserve/front/service gpuserve/front/requests "
        "gpuserve/config/settings gpuserve/core/states gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/front/protocols/http/dashboard_page": "gpuserve/front/net",
    "gpuserve/front/protocols/http/docs_page": "gpuserve/front/net",
    "gpuserve/front/protocols/openai_api":
        "gpuserve/model gpuserve/errors gpuserve/front/protocols/access gpuserve/front/protocols/http "
        "gpuserve/front/net gpuserve/front/service gpuserve/front/requests gpuserve_worker/protocol",
    "gpuserve/front/protocols/openapi":
        "gpuserve/model gpuserve/front/observability gpuserve/front/requests gpuserve_worker/protocol",
    "gpuserve/front/net": "gpuserve/errors gpuserve/front/ipc",
    "gpuserve/front/ingress":
        "gpuserve/control gpuserve/front/net gpuserve/front/ingress gpuserve/front/ingress "
        "gpuserve/front/net gpuserve/journal gpuserve/config/settings gpuserve/core/states gpuserve_worker/protocol",
    "gpuserve/front/ipc": "gpuserve/front/requests gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/front/observability/live":
        "gpuserve/model gpuserve/errors gpuserve/front/scheduling gpuserve/front/models "
        "gpuserve/front/observability gpuserve/front/observability/gpu_health gpuserve/front/service gpuserve/front/requests "
        "gpuserve/journal gpuserve/model/options gpuserve/config/settings",
    "gpuserve/front/ipc":
        "gpuserve/model gpuserve/errors gpuserve/front/scheduling gpuserve/front/ipc gpuserve/front/requests "
        "gpuserve/config/settings gpuserve/core/states gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/front/models":
        "gpuserve/model gpuserve/errors gpuserve/front/scheduling gpuserve/front/ipc gpuserve/front/ipc "
        "gpuserve/front/observability gpuserve/front/observability/tracing gpuserve/front/scheduling gpuserve/front/requests "
        "gpuserve/config/settings gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/front/models":
        "gpuserve/model gpuserve/errors gpuserve/front/scheduling gpuserve/front/ipc gpuserve/front/ipc "
        "gpuserve/front/models gpuserve/front/observability gpuserve/front/observability/tracing gpuserve/front/requests "
        "gpuserve/core/states gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/front/observability":
        "gpuserve/model gpuserve/errors gpuserve/front/requests gpuserve/journal gpuserve/config/settings "
        "gpuserve_worker/protocol",
    "gpuserve/front/observability/gpu_health": "gpuserve/devices gpuserve/front/observability gpuserve/core/states",
    "gpuserve/front/observability/tracing":
        "gpuserve/errors gpuserve/front/requests gpuserve/config/settings gpuserve_worker/protocol",
    "gpuserve/front/ingress":
        "gpuserve/errors gpuserve/front/protocols/access gpuserve/front/net gpuserve/core/states "
        "gpuserve_worker/protocol",
    "gpuserve/front/process":
        "gpuserve/control gpuserve/model gpuserve/errors gpuserve/front/scheduling gpuserve/front/doors "
        "gpuserve/front/protocols/access gpuserve/front/protocols/grpc gpuserve/front/protocols/grpcio "
        "gpuserve/front/protocols/health_port gpuserve/front/net gpuserve/front/ingress gpuserve/front/ipc "
        "gpuserve/front/observability/live gpuserve/front/ipc gpuserve/front/models gpuserve/front/models "
        "gpuserve/front/observability gpuserve/front/observability/gpu_health gpuserve/front/ingress "
        "gpuserve/front/ingress gpuserve/front/net gpuserve/front/service gpuserve/front/requests "
        "gpuserve/config/settings gpuserve_worker/inference gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/front/scheduling": "gpuserve/model gpuserve/errors gpuserve/front/requests gpuserve/core/states",
    "gpuserve/front/ingress":
        "gpuserve/model gpuserve/errors gpuserve/front/scheduling gpuserve/front/net "
        "gpuserve/front/ipc gpuserve/front/ipc gpuserve/front/models gpuserve/front/observability/tracing "
        "gpuserve/front/ingress gpuserve/front/service gpuserve/front/requests gpuserve/config/settings "
        "gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/front/net":
        "gpuserve/front/net gpuserve/front/net gpuserve/front/net gpuserve/config/settings "
        "gpuserve_worker/protocol",
    "gpuserve/front/net": "gpuserve/front/net gpuserve/core/states",
    "gpuserve/front/net": "gpuserve/front/net gpuserve/core/states",
    "gpuserve/front/service":
        "gpuserve/control gpuserve/model gpuserve/errors gpuserve/front/ipc gpuserve/front/ipc "
        "gpuserve/front/models gpuserve/front/observability gpuserve/front/observability/gpu_health "
        "gpuserve/front/observability/tracing gpuserve/front/requests gpuserve/journal gpuserve/config/settings "
        "gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/front/requests":
        "gpuserve/model gpuserve/devices gpuserve/errors gpuserve/model/options gpuserve/config/settings "
        "gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve/openai": "gpuserve/model gpuserve_worker/inference",
    "gpuserve/placement": "gpuserve/model gpuserve/devices gpuserve/errors",
    "gpuserve/cli/new": "gpuserve/errors gpuserve/backends",
    "gpuserve/backends/python_backend": "gpuserve_worker/inference gpuserve_worker/protocol",
    "gpuserve/backends/python_backend/importable": "gpuserve/backends/python_backend",
    "gpuserve/config/triton":
        "gpuserve/config gpuserve/model gpuserve/decorators gpuserve/model/describe gpuserve/devices "
        "gpuserve/errors gpuserve/front/requests gpuserve/model/options gpuserve/placement gpuserve/backends "
        "gpuserve/config/settings gpuserve/config/fingerprints gpuserve_worker/inference",
    "gpuserve/backends":
        "gpuserve/decorators gpuserve/errors gpuserve/config/settings gpuserve_worker/inference "
        "gpuserve_worker/protocol",
    "gpuserve/backends/huggingface": "gpuserve/errors gpuserve/openai gpuserve/backends",
    "gpuserve/config/settings": "gpuserve/errors gpuserve/model/options",
    "gpuserve/supervisor":
        "gpuserve/control gpuserve/model gpuserve/errors gpuserve/journal gpuserve/placement "
        "gpuserve/config/settings gpuserve/supervisor/attach gpuserve/supervisor/core gpuserve/supervisor/models "
        "gpuserve/supervisor/operator gpuserve/supervisor/publication gpuserve/supervisor/reload "
        "gpuserve/supervisor/workers gpuserve_worker/protocol",
    "gpuserve/supervisor/attach":
        "gpuserve/control gpuserve/model gpuserve/errors gpuserve/journal gpuserve/config/settings "
        "gpuserve/core/states gpuserve/supervisor/core gpuserve/supervisor/workers gpuserve_worker/protocol",
    "gpuserve/supervisor/core":
        "gpuserve/control gpuserve/errors gpuserve/journal gpuserve/config/settings gpuserve/core/states gpuserve_worker "
        "gpuserve_worker/inference gpuserve_worker/protocol gpuserve_worker/execution",
    "gpuserve/supervisor/models":
        "gpuserve/control gpuserve/model gpuserve/errors gpuserve/journal gpuserve/placement "
        "gpuserve/config/settings gpuserve/core/states gpuserve/supervisor/attach gpuserve/supervisor/core "
        "gpuserve/supervisor/workers",
    "gpuserve/supervisor/operator":
        "gpuserve/control gpuserve/model gpuserve/errors gpuserve/journal gpuserve/placement "
        "gpuserve/config/settings gpuserve/core/states gpuserve/supervisor/attach gpuserve/supervisor/core "
        "gpuserve/supervisor/models gpuserve/supervisor/publication gpuserve/supervisor/reload "
        "gpuserve/supervisor/workers gpuserve_worker/protocol",
    "gpuserve/supervisor/publication":
        "gpuserve/control gpuserve/journal gpuserve/core/states gpuserve/supervisor/core",
    "gpuserve/supervisor/reload":
        "gpuserve/control gpuserve/model gpuserve/errors gpuserve/journal gpuserve/placement "
        "gpuserve/config/settings gpuserve/config/fingerprints gpuserve/supervisor/attach gpuserve/supervisor/core "
        "gpuserve/supervisor/models",
    "gpuserve/supervisor/workers":
        "gpuserve/control gpuserve/model gpuserve/devices gpuserve/errors gpuserve/journal "
        "gpuserve/config/settings gpuserve/core/states gpuserve/supervisor/core gpuserve_worker/protocol "
        "gpuserve_worker/execution",
    "gpuserve/testing":
        "gpuserve/api gpuserve/config gpuserve/model gpuserve/model/describe gpuserve/display gpuserve/errors "
        "gpuserve/front/scheduling gpuserve/front/models gpuserve/front/requests gpuserve/placement "
        "gpuserve/config/triton gpuserve/config/settings gpuserve/supervisor gpuserve/supervisor/core "
        "gpuserve_worker/inference gpuserve_worker/protocol",
    "gpuserve/bench/tune":
        "gpuserve/bench gpuserve/bench/plan gpuserve/bench/reports gpuserve/bench/server gpuserve/client "
        "gpuserve/config gpuserve/model gpuserve/model/options",
    "gpuserve/typed": "gpuserve/model gpuserve/decorators gpuserve_worker/inference gpuserve_worker/protocol",
    "gpuserve_worker":
        "gpuserve_worker/inference gpuserve_worker/cuda gpuserve_worker/protocol gpuserve_worker/execution",
    "gpuserve_worker/inference": "gpuserve_worker/protocol",
    "gpuserve_worker/cuda":
        "gpuserve_worker/inference gpuserve_worker/cuda/copies gpuserve_worker/cuda/device "
        "gpuserve_worker/memory gpuserve_worker/protocol gpuserve_worker/execution",
    "gpuserve_worker/cuda/copies":
        "gpuserve_worker/inference gpuserve_worker/cuda/device gpuserve_worker/memory gpuserve_worker/protocol "
        "gpuserve_worker/execution",
    "gpuserve_worker/cuda/device": "gpuserve_worker/inference gpuserve_worker/memory gpuserve_worker/protocol",
    "gpuserve_worker/memory": "gpuserve_worker/inference gpuserve_worker/protocol",
    "gpuserve_worker/execution": "gpuserve_worker/inference gpuserve_worker/memory gpuserve_worker/protocol",
}  # fmt: skip
#: Folders that still import each other.
RINGS: set[frozenset[str]] = set()
#: A file or folder -> modules that nothing below it may import, at whatever depth those are.
FORBIDDEN = {
    "gpuserve_worker": {"gpuserve", "grpc", "zmq", "multiprocessing", "logging"},
    "gpuserve/decorators": {"gpuserve", "asyncio", "logging", "dataclasses"},
    "gpuserve/errors": {"gpuserve", "grpc", "asyncio", "numpy"},
    "gpuserve/model": {"grpc", "asyncio", "socket"},
    "gpuserve/model/build.py": {"subprocess", "gpuserve.config"},
    "gpuserve/model/declaration.py": {"subprocess", "gpuserve.config"},
    "gpuserve/model/rules.py": {"subprocess", "gpuserve.config"},
    "gpuserve/model/spec.py": {"subprocess", "gpuserve.config"},
    "gpuserve/front": {"cloudpickle", "pickle"},
    "gpuserve/front/observability/gpu_health": {"cupy", "pynvml"},
    "gpuserve/front/observability/gpu_health/gpu_states.py": {"asyncio", "time", "threading"},
    "gpuserve/front/scheduling": {"asyncio", "time", "socket", "threading", "os", "grpc", "gpuserve_worker"},
    "gpuserve/front/scheduling": {"asyncio", "time", "socket", "threading", "os", "grpc", "gpuserve_worker"},
    "gpuserve/supervisor": {"pickle", "asyncio"},
    "gpuserve/compat/pytriton/decorators.py": {
        "gpuserve.front", "gpuserve.api", "asyncio", "dataclasses", "logging",
    },
    "gpuserve/config": {"grpc"},
    "gpuserve/bench/load_generator.py": {"asyncio", "time", "socket", "threading", "os", "grpc", "hdrh"},
    "gpuserve/export": {"grpc", "subprocess", "socket", "cupy", "pynvml"},
    "gpuserve/bench/tune/settings_search.py": {"time", "random", "subprocess"},
}  # fmt: skip


@dataclass(frozen=True)
class Imports:
    """What a file imports, at any place in it: (module, name), where the name is None for a whole module.

    ``at_run_time`` leaves out what is for type checkers only.
    """

    named: tuple[tuple[str, str | None], ...]
    at_run_time: tuple[tuple[str, str | None], ...]


@functools.cache
def imports(file: Path) -> Imports:
    tree = ast.parse(file.read_text())
    named = tuple(_named(tree, file))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    return Imports(named, tuple(_named(tree, file)))


def _named(tree: ast.AST, file: Path) -> Iterator[tuple[str, str | None]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports are not used here"
            yield from ((str(node.module), alias.name) for alias in node.names)


def modules(found: tuple[tuple[str, str | None], ...]) -> Iterator[str]:
    return (module if name is None else f"{module}.{name}" for module, name in found)


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
        for module in modules(imports(file).at_run_time)
        if any(is_below(module, forbidden) for forbidden in FORBIDDEN[place]) and not is_below(module, own)
    ]
    assert wrong == []


@functools.cache
def folder_edges() -> frozenset[tuple[str, str]]:
    """Every pair of folders of which a file of the first imports one of the second, for type checkers too."""
    files = [file for package in PACKAGES for file in sorted((REPOSITORY / package).rglob("*.py"))]
    homes = {
        ".".join(f.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): f for f in files
    }
    edges = set()
    for file in files:
        for module, name in imports(file).named:
            home = homes.get(f"{module}.{name}") or homes.get(module)
            if home is not None and home.parent != file.parent:
                edges.add(
                    (str(file.parent.relative_to(REPOSITORY)), str(home.parent.relative_to(REPOSITORY)))
                )
    return frozenset(edges)


def test_folders_import_what_the_table_allows_and_nothing_else() -> None:
    edges = folder_edges()
    allowed = {(a, b) for a, targets in ALLOWED.items() for b in targets.split()}
    assert edges - allowed == set(), "an edge between folders that the table does not have"
    assert allowed - edges == set(), "the table allows what nothing needs any more"


def test_no_two_folders_import_each_other() -> None:
    edges = folder_edges()
    rings = {frozenset(edge) for edge in edges if edge[::-1] in edges and "gpuserve" not in edge}
    assert rings == RINGS


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
    modules = loaded_by("import gpuserve_worker.process")
    assert "numpy" in modules
    assert heavy(modules) == set()
    assert not any(is_below(name, "gpuserve") for name in modules)
    assert not {
        name
        for name in modules - loaded_by("import numpy") - BESIDE_NUMPY
        if not is_below(name, "gpuserve_worker") and not name.startswith("_cython_")
    }


def test_a_worker_has_imported_nothing_before_it_takes_care_of_its_start() -> None:
    ours = {
        name for name in loaded_by("import gpuserve_worker.__main__") if is_below(name, "gpuserve_worker")
    }
    assert ours == {"gpuserve_worker", "gpuserve_worker.__main__"}


def test_what_user_code_imports_is_light() -> None:
    modules = loaded_by("import gpuserve.decorators")
    assert heavy(modules) == set()
    ours = {name for name in modules if is_below(name, "gpuserve")}
    assert {name for name in ours if not is_below(name, "gpuserve.decorators")} == {
        "gpuserve",
        "gpuserve.version",
    }


def test_the_package_itself_imports_nothing() -> None:
    modules = loaded_by("import gpuserve")
    assert heavy(modules) == set()
    assert "numpy" not in modules
