"""Model files that try to run code, or to reach files of the machine, and are refused before a library of the
model is imported. Controls show that each payload works where the operator trusts the file.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from attack_payload import Payload
from config_file import write_config
from onnx import TensorProto, helper
from processes import finished
from serving import GPUSERVE

from gpuserve.backends.model_files import ModelFileError
from gpuserve.backends.onnx import OnnxModel
from gpuserve.backends.sklearn import SklearnModel
from gpuserve.cli.bench.request_tensors import read_requests

PICKLES = ("model.pkl", "model.joblib")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What a payload creates."""
    return tmp_path / "created"


def attack(folder: Path, mark: Path, name: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(pickle.dumps(Payload(mark)))
    return str(folder / name)


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("said", [{}, {"trust": "yes"}, {"trust": 1}], ids=["nothing", "yes", "1"])
def test_a_pickle_runs_no_code_when_it_is_loaded(
    tmp_path: Path, mark: Path, name: str, said: dict[str, Any]
) -> None:
    file = attack(tmp_path, mark, name)
    for load in (SklearnModel, SklearnModel.declare):
        with pytest.raises(ModelFileError, match="is a pickle, and loading one runs whatever code is in it"):
            load(file=file, **said)
    assert not mark.exists()


def test_the_attack_runs_where_the_pickle_is_trusted(tmp_path: Path, mark: Path) -> None:
    with pytest.raises(ModelFileError):  # the file is good for no more than its attack
        SklearnModel(file=attack(tmp_path, mark, "model.pkl"), trust=True)
    assert mark.exists()


def test_check_runs_no_attack_and_says_what_to_do(tmp_path: Path, mark: Path) -> None:
    entries = []
    for number, name in enumerate(PICKLES):
        attack(tmp_path / str(number), mark, name)
        entries.append({"name": f"m{number}", "callable": f"{number}/{name}"})
    command = [GPUSERVE, "check", str(write_config(tmp_path, entries))]
    checked = finished(command)
    assert checked.returncode != 0
    assert checked.stderr.count("set kwargs: {trust: true}, or") == len(PICKLES)
    assert not mark.exists()


def test_external_data_of_onnx_is_read_from_beside_the_model_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(np.float32([1, 2, 3]).tobytes())
    (tmp_path / "models").mkdir()
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3], bytes(12), raw=True)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weight]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    file = tmp_path / "models" / "model.onnx"
    for place in ("../secret", str(tmp_path / "secret")):
        model.graph.initializer[0].external_data[0].value = place
        file.write_bytes(model.SerializeToString())
        for load in (OnnxModel, OnnxModel.declare):
            with pytest.raises(
                ModelFileError, match=r"model\.onnx is no ONNX model that onnxruntime can load"
            ):
                load(str(file))
    (tmp_path / "models" / "secret").write_bytes((tmp_path / "secret").read_bytes())
    model.graph.initializer[0].external_data[0].value = "secret"
    file.write_bytes(model.SerializeToString())
    assert OnnxModel.declare(str(file))["inputs"][0]["shape"] == [3]


def test_an_operator_of_onnx_that_nobody_registered_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("Attack", ["x"], ["y"], domain="attack")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("attack", 1)]
    file = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=10), file)
    with pytest.raises(ModelFileError, match=r"model\.onnx is no ONNX model that onnxruntime can load"):
        OnnxModel(str(file))


def test_requests_of_bench_are_read_without_unpickling(tmp_path: Path, mark: Path) -> None:
    file = tmp_path / "requests.npz"
    np.savez(file, x=np.array([Payload(mark)], object))
    with pytest.raises(Exception, match=r"is not an \.npz file of plain arrays"):
        read_requests(str(file))
    assert not mark.exists()
    with np.load(file, allow_pickle=True) as arrays:
        arrays["x"]
    assert mark.exists()
