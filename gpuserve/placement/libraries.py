"""Which libraries for GPUs the worker processes will find. None is imported here: cupy and torch take
seconds, and the supervisor has no business with CUDA.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Final, NamedTuple

from gpuserve.devices.names import CPU
from gpuserve.model.spec import ModelSpec

_EXTRAS: Final = "pip install 'gpuserve[cuda12]' or 'gpuserve[cuda13]'"
#: Distribution -> the CUDA that it is made for.
_CUPY: Final = {"cupy-cuda11x": "11", "cupy-cuda12x": "12", "cupy-cuda13x": "13", "cupy": ""}


class Cupy(NamedTuple):
    """cupy as it is installed; "" where that cannot be told."""

    version: str
    cuda_major: str


def is_importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it is in sys.modules without a spec
        return True


def installed_cupy() -> Cupy | None:
    """The version of cupy that worker processes will import; None where there is none."""
    if not is_importable("cupy"):
        return None
    from importlib import metadata  # brings email and zipfile, which no server needs

    for distribution, cuda_major in _CUPY.items():
        try:
            return Cupy(metadata.version(distribution), cuda_major)
        except metadata.PackageNotFoundError:
            continue
    return Cupy("", "")


def missing_library(spec: ModelSpec, present: Callable[[str], bool] = is_importable) -> str:
    """What a model's workers need for its inputs and will not find, as a sentence; "" for nothing."""
    if spec.array == "numpy":
        return ""
    if any(one.device != CPU for one in spec.instances) and not present("cupy"):
        on_device = [one.name for one in spec.inputs if one.memory == "gpu"]
        what = f"input {on_device[0]!r} on a GPU" if on_device else f"array {spec.array!r}"
        return f"{what} needs cupy, which is not installed: {_EXTRAS}"
    if spec.array == "torch" and not present("torch"):
        return "array 'torch' needs torch, which is not installed"
    return ""
