"""Every import path of PyTriton's that its documents and examples use leads to gpuserve."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = "gpuserve.compat.pytriton"
#: Module below ``pytriton`` -> the names that programs import from it.
NAMES = {
    "": "__version__ client model_config triton",
    "triton": "Triton RemoteTriton TritonBase TritonConfig TritonLifecyclePolicy "
    "DefaultTritonLifecyclePolicy VertextAILifecyclePolicy TritonSecurityConfig VALID_TRITON_ENDPOINTS "
    "DEFAULT_PROTECTED_ENDPOINTS "
    "TRITON_ACCESS_HEADER TRITONSERVER_DIST_DIR INITIAL_BACKEND_SHM_SIZE GROWTH_BACKEND_SHM_SIZE "
    "MONITORING_PERIOD_S WAIT_FORM_MODEL_TIMEOUT_S MODEL_URL MODEL_READY_URL MODEL_CONFIG_URL "
    "MODEL_INFER_URL",
    "model_config": "ModelConfig Tensor DynamicBatcher QueuePolicy TimeoutAction DeviceKind",
    "model_config.model_config": "ModelConfig",
    "model_config.tensor": "Tensor",
    "model_config.common": "DynamicBatcher QueuePolicy TimeoutAction DeviceKind WarmupInput ModelWarmup "
    "generate_warmup_data generate_warmup_requests",
    "model_config.triton_model_config": "TritonModelConfig TensorSpec ResponseCache",
    "model_config.generator": "ModelConfigGenerator",
    "model_config.parser": "ModelConfigParser",
    "decorators": "batch sample group_by_keys group_by_values fill_optionals pad_batch first_value "
    "triton_context ConstantPadder get_inference_request_batch_size get_triton_context get_model_config "
    "convert_output TritonContext ModelConfigDict InputNames InferenceRequest InferenceRequests "
    "InferenceResult InferenceResults",
    "proxy.types": "Request Response Requests Responses ResponsesOrError ResponsesNoneOrError Scope "
    "traced_span",
    "proxy.telemetry": "traced_span set_telemetry_tracer get_telemetry_tracer start_span_from_span "
    "build_proxy_tracer_from_triton_config parse_trace_config",
    "exceptions": "PyTritonError PyTritonValidationError PyTritonInvalidOperationError "
    "PyTritonBadParameterError PyTritonModelConfigError PyTritonUnrecoverableError PyTritonRuntimeError",
    "client": "ModelClient FuturesModelClient AsyncioModelClient DecoupledModelClient "
    "AsyncioDecoupledModelClient",
    "client.client": "ModelClient FuturesModelClient AsyncioModelClient DecoupledModelClient "
    "AsyncioDecoupledModelClient",
    "client.exceptions": "PyTritonClientError PyTritonClientValueError PyTritonClientInvalidUrlError "
    "PyTritonClientTimeoutError PyTritonClientModelUnavailableError PyTritonClientClosedError "
    "PyTritonClientModelDoesntSupportBatchingError PyTritonClientInferenceServerError "
    "PyTritonClientQueueFullError",
    "client.warnings": "PyTritonWarning NotSupportedTimeoutWarning",
    "client.auth": "create_auth_headers extract_access_token_from_headers",
    "client.utils": "TritonUrl ModelState create_client_from_url wait_for_server_ready wait_for_model_ready "
    "get_model_state get_model_config parse_http_response parse_grpc_response LATEST_MODEL_VERSION "
    "DEFAULT_HTTP_PORT DEFAULT_GRPC_PORT",
    "client.asyncio_utils": "asyncio_get_model_state asyncio_get_model_config asyncio_wait_for_server_ready "
    "asyncio_wait_for_model_status_loaded asyncio_wait_for_model_ready",
    "constants": "DEFAULT_HTTP_PORT DEFAULT_GRPC_PORT DEFAULT_METRICS_PORT TRITON_LOCAL_IP "
    "TRITON_CONTEXT_FIELD_NAME DEFAULT_TRITON_STARTUP_TIMEOUT_S CREATE_TRITON_CLIENT_TIMEOUT_S PYTRITON_HOME",
    "utils.logging": "silence_3rd_party_loggers",
    "utils.workspace": "Workspace CleanupWarning",
    "check.utils": "find_free_port",
}
IMPORTS = [(module, name) for module, names in NAMES.items() for name in names.split()]


def run(program: str, **variables: str) -> list[str]:
    """What a fresh interpreter prints that was started by nobody of ours."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_all_of_them_by_their_own_paths() -> None:
    lines = [f"from {'.'.join(filter(None, ('pytriton', module)))} import {name}" for module, name in IMPORTS]
    program = "from gpuserve.compat.pytriton.alias import install; install()\n" + "\n".join(lines)
    assert run(program + "\nprint('imported')") == ["imported"]


INSTALL = "from gpuserve.compat.pytriton.alias import install; install(); install(); "
SAME = """
import importlib.util, pickle, sys
print(importlib.util.find_spec('pytriton.client.utils') is not None)
print(importlib.util.find_spec('pytriton.nothing') is None)
import pytriton.client as c, pytriton.exceptions
import gpuserve.compat.pytriton.client as real
from pytriton import triton
import pytriton.model_config.common
import pytriton.triton as again
print(c is real, triton is again is sys.modules['gpuserve.compat.pytriton.triton'])
print(c.__name__, c.__spec__.name, pytriton.exceptions.__spec__.name, pytriton.__version__)
error = pytriton.exceptions.PyTritonError('lost')
print(type(pickle.loads(pickle.dumps(error))) is type(error), pickle.loads(pickle.dumps(error)).message)
print(pickle.loads(b'cpytriton.exceptions\\nPyTritonError\\n.') is type(error))
try:
    import pytriton.nothing
except ModuleNotFoundError as error:
    print(error.name)
"""


@pytest.mark.parametrize("installed", [False, True])
def test_the_modules_are_the_same_and_come_before_any_installed(tmp_path: Path, installed: bool) -> None:
    if installed:
        (tmp_path / "pytriton").mkdir()
        (tmp_path / "pytriton" / "__init__.py").write_text("raise ImportError('the real one')")
    assert run(INSTALL + SAME, PYTHONPATH=str(tmp_path)) == [
        "True",
        "True",
        "True True",
        f"{PACKAGE}.client {PACKAGE}.client {PACKAGE}.exceptions 0.7.0",
        "True lost",
        "True",
        "pytriton.nothing",
    ]


def test_programs_started_from_here_find_it_too(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys\n"
        + INSTALL
        + "subprocess.run([sys.executable, '-c', 'import pytriton.client as c; print(c.__name__)'])\n"
        "print(os.environ['PYTHONPATH'].split(os.pathsep)[1:])"
    )
    assert run(program, PYTHONPATH=str(tmp_path)) == [f"{PACKAGE}.client", str([str(tmp_path)])]


def test_decorators_do_not_bring_a_server_into_a_worker() -> None:
    loaded = run(f"import {PACKAGE}.decorators, sys; print(*sys.modules, sep='\\n')")
    heavy = {"asyncio", "cloudpickle", "dataclasses", "grpc", "tritonclient", "gpuserve.api.server"}
    assert not heavy & set(loaded)
    assert not [name for name in loaded if name.startswith(("gpuserve.supervisor", "gpuserve.front"))]


@pytest.mark.thorough
def test_nothing_but_gpuserve_run_knows_of_the_map() -> None:
    package = HERE.parent.parent / "gpuserve"
    for file in package.rglob("*.py"):
        if file.is_relative_to(package / "compat") or file == package / "cli" / "triton_commands.py":
            continue
        names = [
            node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)
        ]
        names = [name for name in map(str, names) if not name.startswith("gpuserve.compat.tritonserver")]
        assert not [name for name in names if name.startswith("gpuserve.compat")], file
