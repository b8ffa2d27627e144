"""Where inputs are to lie and what kind of array they come as, in Python and in config files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuserve import ModelConfig, Tensor
from gpuserve.api.binding import model_spec
from gpuserve.config.model_specs import model_spec as spec_of_entry
from gpuserve.config.rules import violations
from gpuserve.config.schema import ModelEntry
from gpuserve.core.errors import BindError
from gpuserve.model.build import ensemble_spec
from gpuserve.model.spec import ModelSpec

#: array, memory of a float input, then what both come to; a BYTES input beside it always stays on the host.
CASES = [
    (None, None, "numpy", "cpu"),
    (None, "cpu", "numpy", "cpu"),
    (None, "gpu", "cupy", "gpu"),
    ("numpy", None, "numpy", "cpu"),
    ("cupy", None, "cupy", "gpu"),
    ("cupy", "cpu", "cupy", "cpu"),
    ("torch", None, "torch", "gpu"),
    ("torch", "gpu", "torch", "gpu"),
]


def answer(requests: Any) -> Any:
    return requests


def bound(array: Any, *inputs: Tensor, outputs: tuple[Tensor, ...] = ()) -> ModelSpec:
    return bound_on("cuda:0", array, *inputs, outputs=outputs)


def bound_on(device: Any, array: Any, *inputs: Tensor, outputs: tuple[Tensor, ...] = ()) -> ModelSpec:
    config = ModelConfig(array=array)
    return model_spec("m", answer, inputs, outputs, 1, config, False, "thread", device=device)


def entry(array: str | None, *inputs: dict[str, Any]) -> dict[str, Any]:
    tensors = [{"shape": [1], "dtype": "float32", **one} for one in inputs]
    instances = [{"device": "cuda:*"}]
    return {
        "name": "m",
        "callable": "m.py:M",
        "inputs": tensors,
        "outputs": [],
        "array": array,
        "instances": instances,
    }


@pytest.mark.parametrize(("array", "memory", "kind", "where"), CASES)
def test_what_is_left_out(array: str | None, memory: str | None, kind: str, where: str) -> None:
    spec = bound(array, Tensor((1,), np.float32, "x", memory=memory), Tensor((1,), bytes, "s"))
    assert spec.array == kind
    assert [one.memory for one in spec.inputs] == [where, "cpu"]
    assert ModelSpec.from_wire(spec.to_wire()).inputs == spec.inputs
    plain = entry(array, {"name": "x", "memory": memory}, {"name": "s", "dtype": "bytes"})
    assert not list(violations({"models": [plain]}))
    declared = spec_of_entry(ModelEntry.read(plain, (), []), "/")
    assert (declared.array, [one.memory for one in declared.inputs]) == (kind, [where, "cpu"])


@pytest.mark.parametrize(
    ("array", "tensor", "text"),
    [
        ("jax", Tensor((1,), "FP32"), "array must be one of 'numpy', 'cupy' or 'torch', got 'jax'"),
        (None, Tensor((1,), "FP32", memory="disk"), "memory must be 'cpu', 'gpu' or None, got 'disk'"),
        (None, Tensor((1,), bytes, memory="gpu"), "memory must be 'cpu': byte strings stay on the host"),
        (
            "numpy",
            Tensor((1,), "FP32", memory="gpu"),
            "memory 'gpu' needs array 'cupy' or 'torch': numpy arrays are on the host",
        ),
    ],
)
def test_what_cannot_be(array: Any, tensor: Tensor, text: str) -> None:
    with pytest.raises(BindError) as raised:
        bound(array, tensor)
    assert str(raised.value).endswith(text)


def test_outputs_have_no_memory() -> None:
    with pytest.raises(BindError, match="only inputs have a memory; outputs may be anywhere"):
        bound(None, outputs=(Tensor((1,), "FP32", memory="gpu"),))


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        (entry("numpy", {"name": "x", "memory": "gpu"}), "memory 'gpu' needs array 'cupy' or 'torch'"),
        (entry(None, {"name": "s", "dtype": "bytes", "memory": "gpu"}), "byte strings stay on the host"),
        (
            {"name": "e", "ensemble": {}, "inputs": [{"name": "x", "dtype": "float32", "memory": "gpu"}]},
            "memory does not go with ensemble",
        ),
    ],
)
def test_what_a_config_cannot_say(plain: dict[str, Any], text: str) -> None:
    (found,) = [one for one in violations({"models": [plain]}) if one.path[-1] == "memory"]
    assert found.path == ("models", 0, "inputs", 0, "memory")
    assert text in found.text


def test_an_ensemble_says_nothing_of_memory() -> None:
    given = Tensor((1,), "FP32", "x", memory="gpu")
    with pytest.raises(BindError, match="memory is for the inputs of the models of its steps"):
        ensemble_spec("e", [given], [Tensor((1,), "FP32", "y")], [], 1, 0, False)


NEEDS_GPU = "CuPy arrays as inputs need a GPU: expected device 'cuda:0', 'cuda:*', … for every instance"


@pytest.mark.parametrize("device", ["cpu", ["cuda:0", "cpu"]])
@pytest.mark.parametrize(("array", "memory"), [("cupy", None), (None, "gpu")])
def test_cupy_arrays_on_the_cpu_are_refused_by_bind(device: Any, array: Any, memory: Any) -> None:
    with pytest.raises(BindError) as raised:
        bound_on(device, array, Tensor((1,), "FP32", memory=memory))
    assert str(raised.value).startswith(f"device: {NEEDS_GPU}")
    bound_on(device, "torch", Tensor((1,), "FP32", memory=memory))


@pytest.mark.parametrize(
    ("keys", "instances", "path"),
    [
        ({"array": "cupy"}, [{"device": "cuda:0"}, {"device": "cpu"}], ("instances", 1, "device")),
        ({"array": "cupy"}, [{"count": 2}], ("instances", 0)),
        ({"array": "cupy"}, None, ("array",)),
        ({"memory": "gpu"}, [{"device": "cpu"}], ("instances", 0, "device")),
        ({"memory": "gpu"}, None, ("inputs", 0, "memory")),
        ({"array": "torch"}, [{"device": "cpu"}], None),
        ({"array": "numpy"}, None, None),
    ],
)
def test_cupy_arrays_on_the_cpu_are_refused_in_config(
    keys: dict[str, Any], instances: Any, path: Any
) -> None:
    plain = entry(keys.get("array"), {"name": "x", "memory": keys.get("memory")})
    plain = {key: value for key, value in plain.items() if key != "instances"}
    if instances is not None:
        plain["instances"] = instances
    found = list(violations({"models": [plain]}))
    assert [one.path for one in found] == ([] if path is None else [("models", 0, *path)])
    assert all(one.text.startswith(NEEDS_GPU) for one in found)
