"""A network under Triton's Python backend; which one says the model's configuration. Tensors come and go in
the memory of the host, as the backend has it by default.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton_python_backend_utils as triton

from benchmarks.gpu.models.networks import Network


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        told = json.loads(args["model_config"])["parameters"]
        kind, size, self._device = (told[name]["string_value"] for name in ("kind", "size", "device"))
        self._network = Network(kind, size, self._device)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [triton.InferenceResponse([self._answer(one)]) for one in requests]

    def _answer(self, request: Any) -> Any:
        """By DLPack: the backend of Triton 2.51 takes arrays of NumPy 2 for empty ones."""
        x = torch.from_dlpack(triton.get_input_tensor_by_name(request, "x").to_dlpack())
        return triton.Tensor.from_dlpack("y", self._network.forward(x.to(self._device)).cpu())
