"""Which devices this machine has, as far as can be told without CUDA.

Device files and the driver's list in /proc are counted; nothing is imported or opened. The roots
that are looked under are arguments, so that no machine needs a GPU to have this file tested.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuserve.errors import DeviceError

CPU: Final = "cpu"
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_NODE = re.compile(r"nvidia\d+")
_DRIVER_LIST: Final = "proc/driver/nvidia/gpus"
#: One GPU behind another driver interface: WSL, and the integrated ones.
_SINGLE_GPU_NODES: Final = ("dev/dxg", "dev/nvhost-gpu")


def available_devices(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> list[str]:
    """The devices that a model may name here: "cpu", then "cuda:0" and so on."""
    variable = (os.environ if environ is None else environ).get(VISIBLE)
    return [CPU, *(f"cuda:{index}" for index in range(_visible_count(_gpu_count(root), variable)))]


def check_device(name: str, available: list[str] | None = None) -> None:
    """Do nothing if this machine has the device.

    Raises:
        DeviceError: it has not; the text says which there are.
    """
    devices = available_devices() if available is None else available
    if name in devices:
        return
    hint = f"; {VISIBLE} is {os.environ[VISIBLE]!r}" if VISIBLE in os.environ else ""
    raise DeviceError(f"this machine has no device {name!r}, only {', '.join(devices)}{hint}")


def device_environment(name: str) -> dict[str, str]:
    """What a worker's environment needs besides its parent's for the device to mean the same there.

    CUDA numbers GPUs by speed unless told otherwise; by bus is what the driver's tools show. All GPUs
    stay visible, so that "cuda:1" is still called that inside the worker.
    """
    if name == CPU or "CUDA_DEVICE_ORDER" in os.environ:
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _gpu_count(root: Path) -> int:
    """GPUs that a process can open. A container may see the whole driver list, but not all files."""
    nodes = sum(_NODE.fullmatch(name) is not None for name in _names_in(root / "dev"))
    if nodes:
        return nodes
    listed = len(_names_in(root / _DRIVER_LIST))
    return listed or int(any((root / node).exists() for node in _SINGLE_GPU_NODES))


def _visible_count(present: int, variable: str | None) -> int:
    """How many of the present GPUs ``CUDA_VISIBLE_DEVICES`` leaves: the list ends at its first bad entry.

    An identifier (GPU-…, MIG-…) counts as a device: which it is only the driver could tell.
    """
    if variable is None:
        return present
    count = 0
    for entry in variable.split(","):
        word = entry.strip()
        known = int(word) < present if word.isdecimal() else present and word.startswith(("GPU-", "MIG-"))
        if not known:
            break
        count += 1
    return count


def _names_in(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
