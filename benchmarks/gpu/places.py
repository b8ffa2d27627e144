"""Where this checkout is, what of it the check serves, and the stand-in for CUDA in the place of a GPU."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
MODELS: Final = Path(__file__).resolve().parent / "models"


_TESTS: Final = ROOT / "tests"


@contextmanager
def simulated() -> Iterator[Mapping[str, str]]:
    """What processes need in their environment to see a machine with one GPU, while the context lasts. Calls
    cost there about what they do on a GPU.
    """
    sys.path.insert(0, str(_TESTS))
    gpus = importlib.import_module("gpu_machine")

    with tempfile.TemporaryDirectory(prefix="gpu-stand-in-") as folder:
        yield gpus.GpuMachine(Path(folder), [gpus.GPU_0], **gpus.COSTS).environ
