"""How much memory of the first GPU is in use, by whomever, as the driver's management library tells."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.gpu.running.section import SectionFailed


def used_nbytes() -> int:
    """Bytes in use on the first GPU of this machine.

    Raises:
        SectionFailed: the library is not there, or does not tell.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used)
        finally:
            nvml.nvmlShutdown()
    except Exception as error:  # its errors have no common base without the module
        raise SectionFailed(f"the memory in use cannot be told: {error}") from None
