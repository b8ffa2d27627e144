"""Servers of ``models/shared.py``: the file of its weights, its loads, and what is said of what it shares."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from commands import status
from operated import OperatedServer


def write_weights(folder: Path, first: float, nbytes: int) -> None:
    weights = np.zeros(nbytes // 4, np.float32)
    weights[0] = first
    np.save(folder / "new.npy", weights)
    (folder / "new.npy").rename(folder / "weights.npy")


def loads(folder: Path) -> int:
    return len((folder / "loads").read_text().splitlines())


def shared(server: OperatedServer) -> list[dict[str, Any]]:
    return list(status(server.addresses["HTTP"])["weights"])


def kill_workers(server: OperatedServer) -> None:
    """Kill the workers, and wait until others are ready."""
    workers = server.workers
    loaded = sum("loaded in" in line for line in server.log)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    server.wait_log("loaded in", loaded + len(workers))
    server.wait_model_ready("a")
