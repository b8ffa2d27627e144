"""What a runtime can know of the model that it serves, and of the processors that it may keep busy. No kind
of file is known here.
"""

from __future__ import annotations

import os

from gpuserve_worker.calling.context import ModelContext, current_model


def threads_of(instances: int) -> int:
    """How many threads an instance may keep busy: its part of the processors that it may use."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, instances))


def served_model() -> ModelContext | None:
    """The model that this is made for; None where it is made by hand."""
    try:
        return current_model()
    except LookupError:
        return None
