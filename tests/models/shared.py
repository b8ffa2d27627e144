"""A model whose instances share weights, a file of floats. What it does is told in a folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpuserve.decorators import batch
from gpuserve.weights import shared_weights


class OnDevice:
    """Has a copy of shared weights on a device of torch, and no methods to sleep. ``cpu:0`` is a device."""

    def __init__(self, folder: str) -> None:
        import torch

        self._folder = Path(folder)
        file = self._folder / "weights.npy"
        with shared_weights("numbers", files=[file], device="cpu:0") as weights:
            state = weights.load(self._load, file)
        self._layer = torch.nn.Module()
        self._layer.register_parameter("w", torch.nn.Parameter(torch.empty_like(state["w"], device="meta")))
        self._layer.load_state_dict(state, assign=True)

    def _load(self, file: Path) -> dict[str, Any]:
        import torch

        with (self._folder / "loads").open("a") as journal:
            journal.write(f"{os.getpid()}\n")
        return {"w": torch.from_numpy(np.load(file))}

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        weights = self._layer.w
        told = {"y": float(weights[0]) + float(weights[-1]), "calls": len(weights), "pid": os.getpid()}
        return {
            name: np.full((len(x), 1), value, np.float32 if name == "y" else np.int64)
            for name, value in told.items()
        }


class OnGpu:
    """Has shared weights on a GPU, some of them tied or views. Writes a line to ``loads`` for each load."""

    def __init__(self, folder: str, device: str = "cpu", copy_on_write: bool = False) -> None:
        import torch

        if "CUDA_STAND_IN" in os.environ:
            import torch_on_stand_in

            torch_on_stand_in.install()
        self._torch, self._folder = torch, Path(folder)
        file = self._folder / "weights.npy"
        with shared_weights("numbers", files=[file], device=device, copy_on_write=copy_on_write) as weights:
            state = weights.load(self._load, file)
        assert state["tied"] is state["w"]
        assert state["view"].data_ptr() == state["w"].data_ptr() + 4
        assert type(state["host"]) is np.ndarray
        self._weights, self._view = state["w"], state["view"]
        self._opened_at = self._weights.data_ptr()

    def _load(self, file: Path) -> dict[str, Any]:
        with (self._folder / "loads").open("a") as journal:
            journal.write(f"{os.getpid()}\n")
        weights = self._torch.nn.Parameter(self._torch.from_numpy(np.load(file)), requires_grad=False)
        return {"w": weights, "tied": weights, "view": weights.detach()[1:3], "host": np.arange(3)}

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        assert self._weights.data_ptr() == self._opened_at
        if x[0, 0] < 0:  # a negative number asks for a write
            self._weights[0] = -float(x[0, 0])
        time.sleep(0.02)  # so that all instances get requests
        told = {"y": float(self._weights[0]) + float(self._view.sum()), "calls": 0, "pid": os.getpid()}
        return {
            name: np.full((len(x), 1), value, np.float32 if name == "y" else np.int64)
            for name, value in told.items()
        }


class Shared:
    """Writes a line to ``loads`` for each load, and dies in the load if ``die`` exists."""

    def __init__(self, folder: str, copy_on_write: bool = False) -> None:
        self._folder = Path(folder)
        file = self._folder / "weights.npy"
        with shared_weights("numbers", files=[file], copy_on_write=copy_on_write) as weights:
            self._weights = weights.load(self._load, file)["w"]

    def _load(self, file: Path) -> dict[str, Any]:
        with (self._folder / "loads").open("a") as journal:
            journal.write(f"{os.getpid()}\n")
        if (self._folder / "die").exists():
            (self._folder / "die").unlink()
            os._exit(7)
        return {"w": np.load(file)}

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        if x[0, 0] < 0:  # a negative number asks for a write
            self._weights[0] = -x[0, 0]
        first = float(self._weights[0]) + 0 * float(self._weights.sum())
        anonymous = int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10
        time.sleep(0.02)  # so that both instances get requests
        told = {"y": first, "calls": anonymous, "pid": os.getpid()}
        return {
            name: np.full((len(x), 1), value, np.float32 if name == "y" else np.int64)
            for name, value in told.items()
        }
