"""A stand-in for nvidia-ml-py on a machine without a GPU, over the machine that ``CUDA_STAND_IN`` names.
Names, signatures and errors are those of the library; what it does not have here is not there.
"""

from pynvml import _installed  # isort: skip - before all else, which needs a machine
from pynvml import _devices, _events, _readings
from pynvml._errors import CLASSES as _CLASSES
from pynvml._errors import CODES as _CODES
from pynvml._errors import NVMLError, NVMLLibraryMismatchError
from pynvml._structures import c_nvmlDevice_t

globals().update(_CODES)
globals().update(_CLASSES)
globals().update(
    {
        name: value
        for part in (_devices, _events, _readings)
        for name, value in vars(part).items()
        if name.lower().startswith(("nvml", "c_nvml"))
    }
)
nvmlSystemGetCudaDriverVersion_v2 = _devices.nvmlSystemGetCudaDriverVersion
nvmlDeviceGetPciInfo_v3 = _devices.nvmlDeviceGetPciInfo

__all__ = ["NVMLError", "NVMLLibraryMismatchError", "_installed", "c_nvmlDevice_t"]
