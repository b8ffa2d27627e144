"""What a process that uses CUDA has besides memory of the device, as anyone sees who looks at it: descriptors
of the driver's nodes, which are open until it ends, and a file in /dev/shm, which is there for ever where the
process is killed. Names are the driver's.
"""

from __future__ import annotations

import atexit
import os
from functools import cache
from pathlib import Path
from typing import Final

SHM: Final = Path("/dev/shm")


def open_nodes(directory: Path, number: int) -> None:
    """Have the nodes of the driver and of one GPU open, until the process ends. They are files of the
    simulated machine: /dev is that of the real one.
    """
    _keep(directory, "nvidiactl")
    _keep(directory, "nvidia-uvm")
    _keep(directory, f"nvidia{number}")


def nodes(directory: Path, *names: str) -> tuple[int, ...]:
    """New descriptors of nodes of the driver."""
    (directory / "dev").mkdir(exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    return tuple(os.open(directory / "dev" / name, flags) for name in names)


@cache
def _keep(directory: Path, name: str) -> None:
    nodes(directory, name)


@cache
def open_shared() -> None:
    """Have a file in /dev/shm, which goes with a process that comes to its end."""
    path = SHM / f"cuda.shm.{os.getuid():x}.{os.getpid():x}.1"
    path.write_bytes(bytes(4096))
    atexit.register(path.unlink, missing_ok=True)
