"""Workers in Python environments of their own: a folder, a packed one, and one that cannot be."""

from __future__ import annotations

import shutil
import sys
import tarfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from config_file import write_config
from processes import finished
from serving import FREE_PORTS, GPUSERVE, Addresses, serving

MODELS = Path(__file__).resolve().parents[1] / "models" / "elsewhere.py"
FACTOR = 7
MODEL_PY = """
import only_there
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [-1]})
        return config

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", only_there.FACTOR * one)]) for one in arrays]
"""


def entry(name: str, python: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "callable": f"{MODELS}:Elsewhere", "python": python, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with one module of its own, and neither numpy nor msgpack; beside it packed."""
    folder = tmp_path_factory.mktemp("environments")
    venv.create(folder / "env", symlinks=True)
    packages = folder / f"env/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (packages / "only_there.py").write_text(f"FACTOR = {FACTOR}\n")
    with tarfile.open(folder / "env.tar.gz", "w:gz") as packed:
        packed.add(folder / "env", ".")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Addresses]:
    models = [
        entry("interpreter", "env/bin/python"),
        entry("unpacked", "env"),
        entry("packed", "env.tar.gz", instances=[{"device": "cpu", "count": 2}]),
    ]
    config = write_config(folder, models, host="127.0.0.1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with serving(GPUSERVE, "serve", str(config)) as addresses:
            yield addresses


@pytest.mark.parametrize("model", ["interpreter", "unpacked", "packed"])
def test_a_worker_runs_in_the_environment_of_its_model(server: Addresses, folder: Path, model: str) -> None:
    x = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    x.set_data_from_numpy(np.full((1, 1), 3, np.float32))
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        answer = client.infer(model, [x], client_timeout=20)
    assert answer.as_numpy("y").tolist() == [[3.0 * FACTOR]]
    prefix = Path(answer.as_numpy("prefix")[0, 0].decode())
    unpacked = list((folder / "cache/gpuserve/environments/unpacked").glob("*/"))
    assert prefix == (unpacked[0] if model == "packed" else folder / "env")
    assert len(unpacked) == 1


@pytest.mark.thorough
def test_a_model_py_runs_in_the_environment_that_its_configuration_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "repository" / "there"
    (model / "1").mkdir(parents=True)
    (model / "1/model.py").write_text(MODEL_PY)
    shutil.copy(folder / "env.tar.gz", model / "env.tar.gz")
    path = '{ string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" }'
    (model / "config.pbtxt").write_text(f'parameters {{ key: "EXECUTION_ENV_PATH" value {path} }}')
    with serving(GPUSERVE, "serve", str(model.parent), "--log-format", "json") as addresses:
        x = tritonclient.grpc.InferInput("x", [1], "FP32")
        x.set_data_from_numpy(np.full(1, 3, np.float32))
        with tritonclient.grpc.InferenceServerClient(addresses.grpc) as client:
            assert client.infer("there", [x], client_timeout=20).as_numpy("y").tolist() == [3.0 * FACTOR]


def test_an_environment_that_is_not_there_is_told(folder: Path, tmp_path: Path) -> None:
    tensors = {name: [{"name": "x", "dtype": "float32", "shape": [1]}] for name in ("inputs", "outputs")}
    config = write_config(tmp_path, [entry("m", "nope/bin/python", **tensors)], host="127.0.0.1")
    command = [GPUSERVE, "serve", str(config), *FREE_PORTS, "--log-format", "text"]
    done = finished(command)
    assert done.returncode == 3
    assert f"the Python environment '{tmp_path}/nope/bin/python' does not exist" in done.stderr
    config = write_config(tmp_path, [entry("m", "nope.tar.gz")])
    done = finished([GPUSERVE, "check", str(config)])
    assert done.returncode == 4
    assert "nope.tar.gz' does not exist: expected an interpreter" in done.stderr + done.stdout
