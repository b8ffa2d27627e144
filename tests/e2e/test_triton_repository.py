"""A model repository of Triton as it is: served, asked by tritonclient, changed and loaded again."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models
import pytest
import tritonclient.grpc as grpcclient
from commands import gpuserve
from serving import GPUSERVE, JSON_LOG, Addresses, serving
from tritonclient.utils import InferenceServerException

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(8)
        return config

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", FACTOR * one)]) for one in arrays]
"""
TENSORS = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
CONFIG = 'backend: "python"\nmax_batch_size: 4\ndynamic_batching { }' + TENSORS
ENSEMBLE = (
    'platform: "ensemble" max_batch_size: 4'
    + TENSORS
    + """ensemble_scheduling { step [
      { model_name: "python" model_version: -1
        input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } },
      { model_name: "python" model_version: -1
        input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } } ] }"""
)
ONNX = 'platform: "onnxruntime_onnx" parameters { key: "intra_op_thread_count" value: { string_value: "1" } }'
ANY = "dims: [ -1 ]"
SAME_AS_ONE_MORE = "dims: [ 3 ] reshape { shape: [ 1, 3 ] }"
#: As the models that Triton's documents begin with: no batches, and a model with an axis more.
WHOLE = 'platform: "onnxruntime_onnx"' + TENSORS.replace(ANY, "dims: [ 1, 3 ] reshape { shape: [ 1, 1, 3 ] }")


def python_model(folder: Path, version: int, factor: float, config: str | None = CONFIG) -> Path:
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / str(version) / "model.py").write_text(MODEL.replace("FACTOR", repr(factor)))
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Addresses]]:
    folder = tmp_path_factory.mktemp("repository")
    python_model(folder / "python", 1, 2.0)
    python_model(folder / "complete", 1, 3.0, None)
    python_model(folder / "changing", 1, 1.0)
    python_model(folder / "typo", 1, 1.0, "max_batch: 8")
    (folder / "ensemble" / "1").mkdir(parents=True)
    (folder / "ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    reshaped = python_model(folder / "reshaped", 1, 2.0, CONFIG.replace(ANY, SAME_AS_ONE_MORE))
    says, _, runs = MODEL.partition("    @staticmethod")
    (reshaped / "1" / "model.py").write_text(
        (says + "    def execute" + runs.partition("    def execute")[2]).replace("FACTOR", "(one.ndim - 1)")
    )
    (folder / "whole" / "1").mkdir(parents=True)
    (folder / "whole" / "1" / "model.onnx").write_bytes(onnx_models.identity("FP32", (1, 1, 3)))
    (folder / "whole" / "config.pbtxt").write_text(WHOLE)
    (folder / "needy" / "1").mkdir(parents=True)
    (folder / "needy" / "config.pbtxt").write_text(ENSEMBLE.replace('"python"', '"classless"'))
    (folder / "onnx" / "1").mkdir(parents=True)
    (folder / "onnx" / "1" / "model.onnx").write_bytes(onnx_models.identity("FP32"))
    (folder / "onnx" / "config.pbtxt").write_text(ONNX)
    python_model(folder / "classless", 1, 1.0)
    (folder / "classless" / "1" / "model.py").write_text("")
    with serving(
        GPUSERVE, "serve", str(folder), "--host", "127.0.0.1", "--model-control", "explicit", *JSON_LOG
    ) as addresses:
        yield folder, addresses


@pytest.fixture
def client(repository: tuple[Path, Addresses]) -> Iterator[Any]:
    with grpcclient.InferenceServerClient(repository[1].grpc) as made:
        yield made


def infer(client: Any, model: str, width: int = 3, version: str = "") -> list[float]:
    array = np.arange(width, dtype=np.float32)[None]
    given = grpcclient.InferInput("x", array.shape, "FP32")
    given.set_data_from_numpy(array)
    return list(client.infer(model, [given], version).as_numpy("y")[0])


@pytest.mark.parametrize(
    ("model", "factor"),
    [("python", 2), ("complete", 3), ("ensemble", 4), ("onnx", 1), ("reshaped", 2), ("whole", 1)],
)
def test_models_answer(client: Any, model: str, factor: int) -> None:
    assert infer(client, model) == [0, factor, 2 * factor]


def test_what_the_model_completes_is_its_configuration(client: Any) -> None:
    config = client.get_model_config("complete").config
    assert config.max_batch_size == 8
    assert [one.name for one in config.input] == ["x"]
    assert not config.HasField("dynamic_batching")  # which it did not set
    assert client.get_model_config("python").config.HasField("dynamic_batching")


def test_clients_are_told_what_the_repository_says(client: Any) -> None:
    config = client.get_model_config("onnx").config
    assert (config.platform, config.backend) == ("onnxruntime_onnx", "onnxruntime")
    whole = client.get_model_config("whole").config
    assert (list(whole.input[0].dims), list(whole.input[0].reshape.shape)) == ([1, 3], [1, 1, 3])
    assert config.default_model_filename == "model.onnx"
    assert config.version_policy.latest.num_versions == 1
    assert config.parameters["intra_op_thread_count"].string_value == "1"
    assert client.get_model_metadata("onnx").platform == "onnxruntime_onnx"
    assert client.get_model_metadata("python").platform == "python"
    assert client.get_model_config("ensemble").config.platform == "ensemble"


def test_models_that_are_wrong_are_in_the_index_with_the_reason(client: Any) -> None:
    index = {one.name: one for one in client.get_model_repository_index().models}
    assert index["python"].state == "READY"
    wrong = [index[one].state for one in ("typo", "classless", "needy")]
    assert wrong == ["UNAVAILABLE"] * 3
    assert index["needy"].reason == "model 'classless', which it needs, could not be loaded"
    assert "config.pbtxt:1:1: ModelConfig has no field 'max_batch'" in index["typo"].reason
    assert "has no class TritonPythonModel" in index["classless"].reason


def test_a_model_that_was_mended_is_loaded(repository: tuple[Path, Addresses], client: Any) -> None:
    with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
        client.load_model("typo")
    (repository[0] / "typo" / "config.pbtxt").write_text(CONFIG)
    client.load_model("typo")
    assert infer(client, "typo") == [0, 1, 2]
    (one,) = [one for one in client.get_model_repository_index().models if one.name == "typo"]
    assert (one.version, one.state, one.reason) == ("1", "READY", "")


def test_a_load_reads_the_folder_again(repository: tuple[Path, Addresses], client: Any) -> None:
    folder = python_model(repository[0] / "changing", 2, 5.0, CONFIG.replace("size: 4", "size: 2"))
    client.load_model("changing")
    assert infer(client, "changing") == [0, 5, 10]
    assert client.get_model_config("changing").config.max_batch_size == 2
    with pytest.raises(InferenceServerException, match="version 1 is not"):
        infer(client, "changing", version="1")
    (folder / "config.pbtxt").write_text(CONFIG + "version_policy { all { } }")
    client.load_model("changing")
    assert infer(client, "changing", version="1") == [0, 1, 2]
    client.unload_model("changing")
    assert not client.is_model_ready("changing")


def test_a_folder_that_is_new_is_loaded_by_its_name(repository: tuple[Path, Addresses], client: Any) -> None:
    python_model(repository[0] / "new", 1, 7.0)
    client.load_model("new")
    assert infer(client, "new") == [0, 7, 14]


def test_a_reload_does_what_has_changed(repository: tuple[Path, Addresses], client: Any) -> None:
    folder = python_model(repository[0] / "reloaded", 1, 1.0)
    http = repository[1].http
    assert "model reloaded is loaded" in gpuserve("reload", "--server", http).stderr
    python_model(folder, 1, 6.0)
    ran = gpuserve("reload", "--server", http)
    assert "model reloaded is reloaded" in ran.stderr
    assert "model python" not in ran.stderr
    assert infer(client, "reloaded") == [0, 6, 12]
    (folder / "config.pbtxt").write_text("nonsense")
    ran = gpuserve("reload", "--server", http)
    assert "has no field 'nonsense'" in ran.stderr
    assert infer(client, "reloaded") == [0, 6, 12]  # as it was


@pytest.mark.thorough
def test_torchscript_by_position(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings(
        action="ignore"
    ):  # there are such files, even if new ones are not to be made
        script = torch.jit.trace(lambda a, b: (a + b, a - b), (torch.ones(1, 2), torch.ones(1, 2)))
    (tmp_path / "pair" / "1").mkdir(parents=True)
    script.save(str(tmp_path / "pair" / "1" / "model.pt"))
    tensors = [
        f'{key} {{ name: "{key.upper()}__{number}" data_type: TYPE_FP32 dims: 2 }}'
        for key in ("input", "output")
        for number in (0, 1)
    ]
    (tmp_path / "pair" / "config.pbtxt").write_text(
        'platform: "pytorch_libtorch" max_batch_size: 4 dynamic_batching { } ' + " ".join(tensors)
    )
    with (
        serving(GPUSERVE, "serve", str(tmp_path), "--host", "127.0.0.1", *JSON_LOG) as addresses,
        grpcclient.InferenceServerClient(addresses.grpc) as client,
    ):
        inputs = [grpcclient.InferInput(f"INPUT__{one}", [1, 2], "FP32") for one in (0, 1)]
        for one, values in zip(inputs, ([5, 7], [1, 2]), strict=True):
            one.set_data_from_numpy(np.array([values], np.float32))
        answer = client.infer("pair", inputs)
        assert [answer.as_numpy(f"OUTPUT__{one}").tolist() for one in (0, 1)] == [[[6, 9]], [[4, 5]]]


def test_check_says_what_would_be_served(repository: tuple[Path, Addresses], tmp_path: Path) -> None:
    for name in ("onnx", "classless"):
        shutil.copytree(repository[0] / name, tmp_path / name)
    ran = gpuserve("check", str(tmp_path))
    assert "onnx: cpu#0, batches of up to 32" in ran.stdout
    assert "classless" in ran.stderr
    assert "classless" not in ran.stdout
    assert ran.status == 4


def test_a_repository_that_is_missing_is_a_sentence(tmp_path: Path) -> None:
    ran = gpuserve("serve", str(tmp_path / "none"), str(tmp_path / "neither"))
    assert ran.stderr.count("cannot be read: no such file or directory") == 2
    assert ran.status == 4
