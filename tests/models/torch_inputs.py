"""Callables whose inputs are torch tensors, on the CPU or on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from gpuserve.decorators import batch, pad_batch
from gpuserve_worker.inference.model_context import current_model


@batch
def unchanged(**inputs: Any) -> dict[str, Any]:
    for name, tensor in inputs.items():
        assert isinstance(tensor, torch.Tensor), name
        assert tensor.device.type == current_model().device.partition(":")[0], tensor.device
    return {name: tensor.clone() if name == "FP32" else tensor for name, tensor in inputs.items()}


@batch
@pad_batch
def doubled(x: torch.Tensor) -> dict[str, Any]:
    """Of a tensor that is part of a graph of gradients, as a model outside of ``no_grad`` gives it."""
    weight = torch.nn.Parameter(torch.full((1,), 2.0, device=x.device))
    return {"y": x * weight if x.device.type != "cpu" else (x * weight).detach()}
