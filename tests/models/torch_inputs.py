"""Callables whose inputs are torch tensors, on the CPU or on a GPU, which may be the stand-in's."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from gpuserve.decorators import batch, pad_batch
from gpuserve_worker.inference.model_context import current_model

if "CUDA_STAND_IN" in os.environ:
    import torch_on_stand_in

    torch_on_stand_in.install()


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
    weight = torch.nn.Parameter(torch.full((1,), 2.0).to(x))
    return {"y": x * weight if x.device.type != "cpu" else (x * weight).detach()}


@batch
def strided(x: torch.Tensor) -> dict[str, Any]:
    """Its input as every second number of halves, and how many kernels CuPy has launched, as far as known."""
    launched = 0
    if "CUDA_STAND_IN" in os.environ:
        from cuda_simulation.context import current

        launched = current().calls["launchKernel"]
    y = torch.stack([x, -x], -1).half()[..., 0]
    return {"y": y, "launched": np.full((len(x), 1), launched, np.int64)}
