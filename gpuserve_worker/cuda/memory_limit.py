"""The limit of the memory that a worker allocates on each of its GPUs (``gpu_memory_nbytes``).

CuPy's pool has its limit when the device is opened. torch is limited at its import, whenever that is: an
earlier import of ours would take seconds. The CUDA context and libraries with allocators of their own are not
limited; the front compares the driver's figure with the limit.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gpuserve_worker.cuda.recovery import is_out_of_memory


def limit_torch(nbytes: int, warn: Callable[[str], None]) -> None:
    """Limit torch's memory on every GPU of this process, now or as soon as torch is imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        sys.meta_path.insert(0, _AfterImportOfTorch(partial(_limit, nbytes, warn)))
    else:
        _limit(nbytes, warn, torch)


def limit_text(nbytes: int, error: BaseException | None) -> str:
    """Return the end of a sentence about a failure that the limit has caused, "" for other failures."""
    if error is None or not nbytes or not is_out_of_memory(error):
        return ""
    return f" (gpu_memory_nbytes limits this instance to {nbytes} bytes on its GPU)"


def _limit(nbytes: int, warn: Callable[[str], None], torch: Any) -> None:
    try:
        for number in range(torch.cuda.device_count()):
            total_nbytes = torch.cuda.get_device_properties(number).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total_nbytes), number)
    except Exception as error:  # the import of torch must not fail for it
        warn(f"torch does not limit its memory on the GPU to {nbytes} bytes: {error}")


class _AfterImportOfTorch:
    """The first of Python's module finders. It calls ``then`` with torch after the import of torch."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then
        self._is_searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._then(module)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec
