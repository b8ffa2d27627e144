"""``python -m gpuserve_worker.cuda.probe``: whether a new process can use CUDA, told by its exit status. 0: a
device could be opened. ``EXIT_DEVICE``: none could. ``EXIT_FAILED``: that cannot be told, without cupy.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from gpuserve_worker.cuda.device.runtime import CudaError, CudaUnavailable, Runtime, load_runtime
from gpuserve_worker.running import lifecycle


def exit_status() -> int:
    """Try every device that this process sees, until one can be used."""
    if importlib.util.find_spec("cupy") is None:
        return lifecycle.EXIT_FAILED
    try:
        runtime = load_runtime()
        usable = any(_works(runtime, number) for number in range(runtime.device_count()))
    except (CudaUnavailable, CudaError):
        usable = False
    return lifecycle.EXIT_STOPPED if usable else lifecycle.EXIT_DEVICE


def _works(runtime: Runtime, number: int) -> bool:
    try:
        runtime.use_device(number)
        runtime.destroy_stream(runtime.create_stream())
        runtime.synchronize()
    except CudaError as error:
        return error.is_out_of_memory  # others fill it, which passes
    return True


def main() -> int:
    lifecycle.prepare_process()
    # The standard streams are the server's, whose log may be JSON to the last line.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return exit_status()


if __name__ == "__main__":
    sys.exit(main())
