"""Which class serves a model file, and what is said of a file that cannot be served."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx_models import identity, mlp

from gpuserve.backends.model_files import ModelFileError, threads_per_instance
from gpuserve.backends.onnx import BoundRuns, OnnxModel, has_batch_axis
from gpuserve.backends.registry import is_model_path, name_of, source_of
from gpuserve.cli.app import run
from gpuserve.cli.exit_codes import ExitCode
from gpuserve.config.load import load_file
from gpuserve.config.problems import ConfigProblems


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [one for one in os.environ if one.startswith("GPUSERVE_")]:
        monkeypatch.delenv(name)


def test_what_is_a_path_of_a_model_and_the_name_of_the_model() -> None:
    for text in ("model.onnx", "a/MODEL.ONNX", "folders/bert", "hf:org/name-1.5"):
        assert is_model_path(text), text
    for text in ("model.py:f", "package.module:f", "config.yaml", "linear"):
        assert not is_model_path(text), text
    names = {"a/ResNet 50.onnx": "ResNet_50", ".onnx": "model", "x/bert/": "bert", "hf:gpt2": "gpt2"}
    names |= {"hf:org/name-1.5": "name-1.5"}
    assert {path: name_of(path) for path in names} == names


@pytest.mark.parametrize(
    ("path", "kwargs", "source", "file"),
    [
        ("m.onnx", {"providers": ["CPUExecutionProvider"]}, "gpuserve.backends.onnx:OnnxModel", "{}/m.onnx"),
        ("./bert", {}, "gpuserve.backends.huggingface:HuggingFaceModel", "{}/bert"),
        ("hf:org/name", {"task": "t"}, "gpuserve.backends.huggingface:HuggingFaceModel", "hf:org/name"),
        ("m.py:f", {"a": 1}, "m.py:f", None),
    ],
)
def test_a_file_stands_for_a_class_and_its_arguments(
    tmp_path: Path, path: str, kwargs: dict[str, Any], source: str, file: str | None
) -> None:
    (tmp_path / "m.onnx").touch()
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").touch()
    of_file = {"file": file.format(tmp_path)} if file else {}
    assert source_of(path, kwargs, str(tmp_path)) == (source, of_file | kwargs)


def test_check_prints_what_would_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.onnx").write_bytes(mlp(8, 4))
    assert run(["check", "net.onnx"]) == ExitCode.OK
    assert capsys.readouterr().out == (
        "net: cpu#0, batches of up to 32\n  in   x: FP32 [8]\n  out  y: FP32 [4]\nnet.onnx is valid\n"
    )


def test_a_wrong_file_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    assert run(["serve", "bad.onnx"]) == ExitCode.BAD_CONFIG
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("bad.onnx: bad.onnx is no ONNX model that onnxruntime can load: ")
    assert run(["serve", "absent.onnx"]) == ExitCode.BAD_CONFIG
    assert "there is no file 'absent.onnx' in" in capfd.readouterr().err


def test_a_file_that_is_neither_a_config_nor_a_known_model_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights.h5").write_bytes(b"\x89HDF\r\n")
    assert run(["serve", "weights.h5"]) == ExitCode.BAD_CONFIG
    told = capfd.readouterr().err
    text = "weights.h5: is not UTF-8 text: the byte at offset 0 is 0x89; a config is, and a model"
    assert told.startswith(text)
    assert "expected an ONNX model (.onnx or .ort), a program of PyTorch (.pt2 or .pt or" in told


def test_a_folder_that_nothing_serves_is_told_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "models" / "empty").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("models:\n  - {name: m, callable: models/empty}\n")
    with pytest.raises(ConfigProblems) as caught:
        load_file("config.yaml", {})
    (problem,) = caught.value.problems
    assert (
        "'models/empty' is no supported model file or folder, expected an ONNX model (.onnx or .ort), a "
        in str(problem)
    )
    assert problem.span is not None


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("intra_op_num_threadz", 1, "no session option 'intra_op_num_threadz', expected one of"),
        ("execution_mode", "fast", "execution_mode must be 'sequential' or 'parallel', got 'fast'"),
        ("intra_op_num_threads", "many", "intra_op_num_threads must be of type int, got 'many'"),
    ],
)
def test_a_wrong_option_is_told_where_the_file_is_described(
    tmp_path: Path, option: str, value: Any, text: str
) -> None:
    (tmp_path / "net.onnx").write_bytes(identity("FP32"))
    with pytest.raises(ModelFileError, match=text):
        OnnxModel.declare("net.onnx", **{option: value})


def test_a_missing_library_comes_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelFileError) as caught:
        OnnxModel.declare("folder/net.onnx")
    assert str(caught.value) == (
        "the Python package 'onnxruntime' is not installed; pip install 'gpuserve[onnx]' installs it"
    )


def test_a_first_axis_that_is_free_everywhere_is_the_batch() -> None:
    assert has_batch_axis([["N", 3]], [["N"]])
    assert has_batch_axis([["N", 3], [None]], [["unk__4", 2]])
    for inputs, outputs in (
        ([["N", 3], ["M", 3]], [["N"]]),
        ([["N"]], [[4]]),
        ([["N"]], [[]]),
        ([[1, 3]], [["N"]]),
        ([], [["N"]]),
    ):
        assert not has_batch_axis(inputs, outputs)


@pytest.mark.parametrize(
    ("processors", "instances", "threads"), [(8.0, 1, 8), (8.0, 3, 2), (1.5, 1, 1), (2.0, 1000, 1)]
)
def test_instances_share_the_processors(
    processors: float, instances: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("gpuserve.backends.model_files.n_processors", lambda: processors)
    assert threads_per_instance(instances) == threads


class OnDevice:
    """An array that tells its address as an array of a GPU does."""

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self.__cuda_array_interface__ = array.__array_interface__


class CountedSession(onnxruntime.InferenceSession):
    """A session that counts its bindings."""

    bindings = 0

    def io_binding(self) -> Any:
        self.bindings += 1
        return super().io_binding()


def test_runs_of_one_shape_share_a_binding_and_no_outputs() -> None:
    """As on a GPU, with memory of the host in place of the device's."""
    session = CountedSession(mlp(8, 16, 4), providers=["CPUExecutionProvider"])
    runs = BoundRuns(onnxruntime, session, {"x": "FP32"}, {"y": "FP32"}, ("cpu", 0))
    rows = [np.random.default_rng(count).standard_normal((count, 8), np.float32) for count in (3, 5, 3, 3)]
    rows[3] = rows[2] + 1
    answers = [runs.run({"x": OnDevice(one)})[0] for one in rows]
    for given, answer in zip(rows, answers, strict=True):
        np.testing.assert_array_equal(answer, session.run(["y"], {"x": given})[0])
    assert session.bindings == 2
