"""A linear layer that no rank holds as a whole: each has some of its columns, and the products are summed."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gpuserve.decorators import batch

INPUTS, OUTPUTS = 512, 256


class Linear:
    """y = x W, with W cut along the inputs among the ranks of ``torch.distributed``."""

    def __init__(self, device: str) -> None:
        """Joins the other ranks, by the variables that the server has set: RANK, WORLD_SIZE, MASTER_PORT."""
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        self.device = torch.device(device)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.columns = slice(INPUTS * rank // ranks, INPUTS * (rank + 1) // ranks)
        self.shard = weights()[self.columns].to(self.device)  # a real model loads the file of its rank

    @batch
    def __call__(self, x: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """``x``: float32 [rows, 512], the same in every rank. Answers ``y``: float32 [rows, 256]."""
        mine = torch.from_numpy(x[:, self.columns].copy()).to(self.device)
        y = mine @ self.shard
        dist.all_reduce(y)
        return {"y": y.cpu().numpy()}  # that of rank 0 is the answer

    def close(self) -> None:
        """Called in every rank when the server stops the instance."""
        dist.destroy_process_group()


def weights() -> torch.Tensor:
    """The whole matrix, [512, 256]: small integers, so that sums are exact in any order."""
    return torch.arange(INPUTS * OUTPUTS, dtype=torch.float32).reshape(INPUTS, OUTPUTS) % 7
