"""A model that tells what its process sees of the machine: in a file as it loads, and when it is asked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np


def seen(device: str) -> dict[str, Any]:
    """The GPUs by CUDA, and what the process was given."""
    policies = [line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    found: dict[str, Any] = {
        "device": device,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "order": os.environ.get("CUDA_DEVICE_ORDER"),
        "cpus": sorted(os.sched_getaffinity(0)),
        "preferred": sorted({one for one in policies if one.startswith("prefer")}),
        "pid": os.getpid(),
    }
    if device != "cpu":
        from cupy.cuda import runtime

        count = runtime.getDeviceCount()
        found["gpus"] = [runtime.getDeviceProperties(number)["uuid"].hex() for number in range(count)]
    return found


class View:
    """Writes what it sees into ``directory``, under the name of its instance, before it is ready."""

    def __init__(self, device: str, directory: str) -> None:
        self._seen = json.dumps(seen(device))
        instance = Path("/proc/self/comm").read_text().strip().rpartition("/")[2]
        (Path(directory) / instance).write_text(self._seen)

    def __call__(self, requests: list[Any]) -> list[dict[str, Any]]:
        answer = np.array([[self._seen.encode()]], object)
        return [{"seen": answer} for _ in requests]
