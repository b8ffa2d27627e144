"""What is cold on a fresh machine, once and timed: the first import of each large library, and its first
kernel. ``python -m benchmarks.gpu.running.warming`` prints a line of JSON for each as it is there.

Sections start when all of it has been read from the disk, so that none of them pays for it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

_LIBRARIES: Final = ("numpy", "grpc", "cupy", "torch")


def warmed(environment: Mapping[str, str], timeout_s: float) -> str:
    """Seconds by what they were spent on; what did not come in time is said."""
    began_at = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu.running.warming"]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, timeout=timeout_s, check=False
        )
        output, rest = done.stdout, [f"then status {done.returncode}"] if done.returncode else []
    except subprocess.TimeoutExpired as error:
        output, rest = error.stdout or b"", [f"no more in {timeout_s:.0f} s"]
    lines = [f"{name} {told}" for name, told in map(json.loads, output.splitlines())]
    return f"{time.monotonic() - began_at:.1f} s in all: {', '.join(lines + rest)}"


def main() -> None:
    for name in _LIBRARIES:
        _tell(name, importlib.import_module, name)
        if name in _KERNELS and name in sys.modules:
            _tell(f"first kernel of {name}", _KERNELS[name], sys.modules[name])


def _of_cupy(cupy: Any) -> None:
    (cupy.zeros(4, cupy.float32) * 2).get()


def _of_torch(torch: Any) -> None:
    """A product of matrices brings cuBLAS, too."""
    if not torch.cuda.is_available():
        raise ImportError("torch sees no GPU")
    one = torch.ones(64, 64, device="cuda")
    (one @ one).sum().item()


_KERNELS: Final[dict[str, Callable[[Any], None]]] = {"cupy": _of_cupy, "torch": _of_torch}


def _tell(name: str, call: Callable[..., object], *args: object) -> None:
    began_at = time.monotonic()
    try:
        call(*args)
    except Exception as error:  # what is not there is told by the sections that need it
        told = f"failed ({error})"
    else:
        told = f"{time.monotonic() - began_at:.1f} s"
    print(json.dumps([name, told]), flush=True)


if __name__ == "__main__":
    main()
