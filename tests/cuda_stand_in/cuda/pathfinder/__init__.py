"""The stand-in for cuda-pathfinder: where CUDA's compiler and cuBLAS are looked for. Found is what lies in
one of the folders of ``site``; what else is on ``sys.path`` does not count.
"""

from __future__ import annotations

import functools
import site
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Where the wheels of CUDA 13 have them.
_FILES: Final = {"nvrtc": "nvidia/cu13/lib/libnvrtc.so.13", "cublas": "nvidia/cu13/lib/libcublas.so.13"}


class DynamicLibNotFoundError(RuntimeError):
    """A library is in none of the places."""


@dataclass(frozen=True)
class LoadedDL:
    """A library that was found."""

    abs_path: str
    found_via: str = "site-packages"


@functools.cache
def load_nvidia_dynamic_lib(libname: str) -> LoadedDL:
    """Raises DynamicLibNotFoundError."""
    file = _FILES[libname]
    folders = [*([site.getusersitepackages()] if site.ENABLE_USER_SITE else []), *site.getsitepackages()]
    for folder in folders:
        path = Path(folder) / file
        if path.is_file():
            return LoadedDL(str(path))
    where = "\n  ".join(folders)
    name = Path(file).name.partition(".")[0]
    raise DynamicLibNotFoundError(f'Failure finding "{name}.so":\n  No such file: {file}\n  {where}')
