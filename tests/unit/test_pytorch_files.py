"""Files of PyTorch: what is read from them, and how they answer when a worker calls them."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuserve.backends.model_files import ModelFileError
from gpuserve.backends.pytorch import PytorchModel
from gpuserve_worker.inference.inference_request import Request, RequestBatch
from gpuserve_worker.inference.model_context import ModelContext, enter_model
from gpuserve_worker.protocol.tensor import TensorSpec

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.thorough

DYNAMIC = torch.export.Dim("batch", max=16)


class Scores(torch.nn.Module):
    """Two inputs and two outputs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.layer(x) + bias, "sum": x.sum(1)}


class Pair(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a - b, a * b


def exported(folder: Path, model: torch.nn.Module, *args: Any, shapes: Any = None, **kwargs: Any) -> str:
    file = str(folder / "m.pt2")
    torch.export.save(torch.export.export(model, args, kwargs, dynamic_shapes=shapes), file)
    return file


def scripted(folder: Path, model: torch.nn.Module) -> str:
    file = str(folder / "m.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        torch.jit.script(model).save(file)
    return file


def served(
    file: str, inputs: Sequence[TensorSpec], outputs: Sequence[str], max_batch_size: int = 8, **kwargs: Any
) -> PytorchModel:
    """The model as a worker makes it, for what a config declares."""
    specs = tuple(TensorSpec(name, "FP32", (-1,)) for name in outputs)
    context = ModelContext("m", 1, "cpu#0", "cpu", tuple(inputs), specs, max_batch_size, (), False)

    def make() -> PytorchModel:
        enter_model(context)
        return PytorchModel(file, trust=True, **kwargs)

    threads = torch.get_num_threads()
    try:
        return contextvars.copy_context().run(make)
    finally:
        torch.set_num_threads(threads)


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "FP32", shape)


def declared(**shapes: list[int]) -> list[dict[str, Any]]:
    return [{"name": name, "dtype": "FP32", "shape": shape} for name, shape in shapes.items()]


def test_an_exported_program_tells_its_tensors(tmp_path: Path) -> None:
    shapes = {"x": {0: DYNAMIC}, "bias": {0: DYNAMIC}}
    file = exported(tmp_path, Scores(), torch.ones(3, 8), bias=torch.ones(3, 4), shapes=shapes)
    assert PytorchModel.declare(file, trust=True) == {
        "inputs": declared(x=[8], bias=[4]),
        "outputs": declared(scores=[4], sum=[]),
        "max_batch_size": 16,
        "array": "torch",
    }
    model = served(file, [spec("bias", 4), spec("x", 8)], ["sum"])
    rows = np.arange(16, dtype=np.float32).reshape(2, 8)
    (answer,) = model([Request({"bias": np.zeros((2, 4), np.float32), "x": rows})])
    assert answer["sum"].tolist() == rows.sum(1).tolist()
    single = served(file, [spec("bias", 4), spec("x", 8)], ["sum"], 0)
    request = Request({"bias": np.zeros(4, np.float32), "x": rows[0]})
    (answer,) = single(RequestBatch([request], ["sum"], batching=False))
    assert answer["sum"].tolist() == rows[0].sum()


class Constants(torch.nn.Module):
    """Weights of every kind: a parameter, buffers that are saved or not, and a constant of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        self.register_buffer("saved", torch.full((4,), 2.0))
        self.register_buffer("made", torch.full((4,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.saved + self.made + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_an_exported_program_computes_with_shared_weights_and_torchscript_has_none(tmp_path: Path) -> None:
    module = Constants()
    file = exported(tmp_path, module, torch.ones(3, 8), shapes=({0: DYNAMIC},))
    rows = np.arange(16, dtype=np.float32).reshape(2, 8)
    expected = module(torch.from_numpy(rows)).detach().numpy()
    # Copies on a device stand for memory that is shared there.
    for kwargs in ({"shared_weights": True}, {"shared_weights": True, "device": "cpu:0"}):
        model = served(file, [spec("x", 8)], ["OUTPUT__0"], **kwargs)
        (answer,) = model([Request({"x": rows})])
        assert np.allclose(answer["OUTPUT__0"], expected)
    with pytest.raises(ModelFileError, match="TorchScript keeps copies of its own"):
        served(scripted(tmp_path, Pair()), [spec("a", 8), spec("b", 8)], ["OUTPUT__0"], shared_weights=True)


@pytest.mark.parametrize("is_fixed", [True, False])
def test_axes_that_are_fixed_or_never_one_are_no_batch(tmp_path: Path, is_fixed: bool) -> None:
    never_one = {0: torch.export.Dim("n", min=2, max=8)}
    shapes = None if is_fixed else (never_one, never_one)
    file = exported(tmp_path, Pair(), torch.ones(3, 8), torch.ones(3, 8), shapes=shapes)
    said = PytorchModel.declare(file, trust=True)
    assert said["max_batch_size"] == 0
    assert [one["shape"] for one in said["inputs"]] == [[3 if is_fixed else -1, 8]] * 2
    assert [one["name"] for one in said["outputs"]] == ["OUTPUT__0", "OUTPUT__1"]


def test_torchscript_asks_for_what_it_does_not_tell(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"m\.pt is TorchScript, which has neither") as told:
        PytorchModel.declare(scripted(tmp_path, Pair()))
    assert "inputs: [{name: a, dtype: float32, shape: [-1]}, {name: b, dtype" in str(told.value)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (("a", "b"), ("OUTPUT__0", "OUTPUT__1")),
        (("b", "a"), ("difference", "product")),
        (("INPUT__0", "INPUT__1"), ("OUTPUT__0", "OUTPUT__1")),
        (("INPUT__1", "INPUT__0"), ("OUTPUT__1",)),
    ],
)
def test_torchscript_goes_by_names_or_by_positions(
    tmp_path: Path, inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    model = served(scripted(tmp_path, Pair()), [spec(one, -1) for one in inputs], outputs)
    five, three = np.full((2, 1), 5, np.float32), np.full((2, 1), 3, np.float32)
    by_name = {name: five if name in {"a", "INPUT__0"} else three for name in inputs}
    (answer,) = model([Request(by_name)])
    expected = [15.0] if outputs == ("OUTPUT__1",) else [2.0, 15.0]
    assert [float(answer[name][0, 0]) for name in outputs] == expected


def test_names_that_the_file_does_not_have_are_told(tmp_path: Path) -> None:
    file = scripted(tmp_path, Pair())
    with pytest.raises(ModelFileError, match=r"m.pt has no input 'c', expected 'a' and 'b', or INPUT__0"):
        served(file, [spec("a", -1), spec("c", -1)], ["y"])
    model = served(file, [spec("a", -1), spec("b", -1)], ["OUTPUT__2"])
    one = np.ones((1, 1), np.float32)
    with pytest.raises(ValueError, match="gave 2 outputs, and 'OUTPUT__2' would be number 3"):
        model([Request({"a": one, "b": one})])


@pytest.mark.parametrize(
    ("name", "text"),
    [("m.pt", "weights alone (torch.save) have no program"), ("m.pt2", "torch.export.save wrote")],
)
def test_a_file_that_is_something_else(
    tmp_path: Path, name: str, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save(Scores().state_dict(), tmp_path / name)
    with pytest.raises(ModelFileError) as caught:
        PytorchModel.declare(str(tmp_path / name), trust=True)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
