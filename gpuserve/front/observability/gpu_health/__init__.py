"""GPU health as the front observes it: NVML readings (``gpu_monitor``, in a thread of its own), the states
that follow from them (``gpu_states``, pure), and the metrics. CUDA is never used here.
"""

from __future__ import annotations
