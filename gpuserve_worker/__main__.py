"""A worker's command line: ``python -m gpuserve_worker BOOT_FD LINK_FD [STACKS_FD [FOLLOWER_FD …]]``, all
inherited.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

#: Spin time of an idle OpenBLAS thread before it sleeps, as a power of two of processor clock ticks: 0.4 ms.
#: The default is a tenth of a second, which each thread of each worker would burn at its start. The number of
#: threads is unchanged. With a lower value, consecutive matrix products wait for threads to wake up.
_BLAS_SPIN: Final = ("OPENBLAS_THREAD_TIMEOUT", "20")

#: Threshold of garbage collection during imports. Imported objects stay alive, so collecting them is wasted
#: time: with Python's default of 700, collection is a twentieth of the start time. With collection disabled,
#: a quarter of a MiB of garbage would stay.
_YOUNG_OBJECTS: Final = 20_000


def main() -> int:
    """Import the modules that every worker needs, and run one worker. Return its exit status."""
    os.environ.setdefault(*_BLAS_SPIN)
    usual = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS)
    from gpuserve_worker.protocol.stack_signals import block_stacks_signal

    block_stacks_signal()  # before numpy starts threads, to one of which the signal would be fatal
    from gpuserve_worker.process import run

    gc.freeze()
    gc.set_threshold(*usual)  # user code runs with the default thresholds
    return run()


if __name__ == "__main__":
    sys.exit(main())
