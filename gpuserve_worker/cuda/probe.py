"""A check whether a process can use CUDA. ``python -m gpuserve_worker.cuda.probe`` exits with 0,
``EXIT_DEVICE`` or ``EXIT_FAILED``.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from gpuserve_worker.cuda.device.runtime import CudaError, CudaUnavailable, Runtime, load_runtime
from gpuserve_worker.execution import lifecycle


def exit_status() -> int:
    """Return the exit status after trying the visible devices until one can be used."""
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
        return error.is_out_of_memory  # temporary: other processes use the memory
    return True


def main() -> int:
    lifecycle.prepare_process()
    # The standard streams are those of the server, whose log may be JSON throughout.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return exit_status()


if __name__ == "__main__":
    sys.exit(main())
