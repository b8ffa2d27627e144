"""The kinds of device that a worker can have. The only place that names them: what a kind does is in a folder
of its own, which only a worker with such a device imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuserve_worker.calling.callable import LoadError
from gpuserve_worker.protocol.wire import Init
from gpuserve_worker.running.host_path import HostPath
from gpuserve_worker.running.lifecycle import EXIT_DEVICE
from gpuserve_worker.running.supervision import Reporter

if TYPE_CHECKING:
    from gpuserve_worker.running.device_path import WorkerDevicePath


def open_path(init: Init, reporter: Reporter) -> WorkerDevicePath:
    """The path to the worker's device, opened before user code can be in its way; raises ``LoadError``."""
    if init.device != "cpu":
        from gpuserve_worker.cuda.path import open_cuda

        return open_cuda(init, reporter) or HostPath()
    if init.array == "cupy":
        raise LoadError(
            f"the inputs of model {init.model!r} are to be CuPy arrays, which instance {init.instance!r} "
            "on the CPU cannot have: expected an instance on a GPU, or array torch or numpy"
        )
    return HostPath()


def is_unusable(device: str) -> bool:
    """Whether this process cannot use a device that it was given."""
    if device == "cpu":
        return False
    from gpuserve_worker.cuda.probe import exit_status

    return exit_status() == EXIT_DEVICE
