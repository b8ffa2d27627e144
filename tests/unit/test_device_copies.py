"""Copies of shared weights on a device, which torch's second name of the CPU stands for."""

from __future__ import annotations

from typing import Any

import pytest
from optional_packages import needs

from gpuserve.weights import shared_weights
from gpuserve_worker.memory import device_copies, device_weights

pytestmark = needs("torch")
DEVICE = "cpu:0"


def tied() -> Any:
    """Return a module of two layers that share their weights."""
    import torch

    module = torch.nn.Module()
    module.first = torch.nn.Linear(8, 8)
    module.second = torch.nn.Linear(8, 8)
    module.second.weight = module.first.weight
    module.register_buffer("scale", torch.full((3,), 2.0))
    return module


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "_SLEEPERS", [])


def test_dropped_copies_have_no_bytes_and_restored_ones_have_all() -> None:
    import torch

    whole = torch.arange(24.0)
    given = {"a": whole, "parts": [whole[3:7], (whole.reshape(4, 6).T,)], "name": "x"}
    copied = device_weights.on_device(given, DEVICE, remember=True)
    tensors = [copied["a"], copied["parts"][0], copied["parts"][1][0]]
    expected = [one.clone() for one in tensors]
    assert copied["name"] == "x"
    assert device_copies.are_there()
    tensors[0].zero_()  # what is written is lost
    device_copies.drop()
    assert [one.untyped_storage().nbytes() for one in tensors] == [0, 0, 0]
    device_copies.restore()
    assert all(torch.equal(one, before) for one, before in zip(tensors, expected, strict=True))
    assert torch.equal(whole, torch.arange(24.0))


def test_a_module_keeps_its_ties_and_works_again() -> None:
    import torch

    module = device_weights.on_device(tied(), DEVICE, remember=True)
    row = torch.ones(8)
    before = module.second(module.first(row)) * module.scale[0]
    assert module.second.weight is module.first.weight
    device_copies.drop()
    assert module.first.weight.untyped_storage().nbytes() == 0
    assert module.scale.untyped_storage().nbytes() == 0
    device_copies.restore()
    assert torch.equal(module.second(module.first(row)) * module.scale[0], before)
    assert len(device_copies._SLEEPERS) == 4


def test_a_state_of_a_module_keeps_its_kind() -> None:
    state = tied().state_dict()
    copied = device_weights.on_device(state, DEVICE, remember=False)
    assert (type(copied), copied._metadata) == (type(state), state._metadata)
    assert not device_copies.are_there()


@pytest.mark.parametrize("value", [{}, {"w": [1.0]}])
def test_weights_without_a_tensor_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="needs torch tensors"), shared_weights("w", device=DEVICE) as weights:
        weights.load(lambda: value)
