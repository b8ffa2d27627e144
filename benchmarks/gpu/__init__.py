"""What ``scripts/gpu_check`` does on a machine with a GPU: facts, tests, figures, faults; one report.

Each section runs in a process of its own, so that one that crashes, hangs or leaves its device in error takes
nothing else with it. ``__main__.py`` is the command line, ``running/`` runs sections and reports,
``sections/`` has the sections, ``served/`` servers and clients, ``models/`` what is served, and
``questions/`` what ``sections/facts.py`` asks of the device. Here: the place of this checkout, and CUDA's
stand-in for a GPU.
"""

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


@contextmanager
def simulated() -> Iterator[Mapping[str, str]]:
    """Give what processes need in their environment to see a machine with one GPU, where calls cost about
    what they do on a GPU.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    gpus = importlib.import_module("gpu_machine")
    with tempfile.TemporaryDirectory(prefix="gpu-stand-in-") as folder:
        yield gpus.GpuMachine(Path(folder), [gpus.GPU_0], **gpus.COSTS).environ
