"""A linear layer, y = x W + b, on any device: numpy on the CPU, PyTorch on a GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators import batch

INPUT_FEATURES = 20


def parameters(features: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Weight, [20, features], and bias, [features]. The same in every process, so that a client can check."""
    generator = np.random.default_rng(seed=0)
    weight = generator.standard_normal((INPUT_FEATURES, features), dtype=np.float32)
    return weight, generator.standard_normal(features, dtype=np.float32)


class Linear:
    """The layer on one device.

    Args:
        features: how many outputs the layer has.
        device: "cpu" or "cuda:0"; the instance's device.
    """

    def __init__(self, features: int, device: str = "cpu") -> None:
        self._device = device
        self._weight, self._bias = parameters(features)
        if device != "cpu":
            import torch

            self._weight = torch.from_numpy(self._weight).to(device)
            self._bias = torch.from_numpy(self._bias).to(device)

    @batch
    def __call__(self, x: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """``x``: float32, [rows, 20]. Answers ``y``: float32, [rows, features]."""
        if self._device == "cpu":
            return {"y": x @ self._weight + self._bias}
        import torch

        y = torch.from_numpy(x).to(self._device) @ self._weight + self._bias
        return {"y": y.cpu().numpy()}
