"""``python -m gpuserve_worker BOOT_FD LINK_FD [STACKS_FD]``, all inherited: a worker process."""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

#: So many ticks of the processor's clock, as a power of two, a thread of OpenBLAS looks for work before it
#: sleeps: 0.4 ms. By default it is a tenth of a second, which each thread of each worker would spend as it
#: comes up. There are as many threads as ever; with fewer ticks than these, products in a row wait for them.
_BLAS_SPIN: Final = ("OPENBLAS_THREAD_TIMEOUT", "20")

#: Objects until garbage is looked for while modules are imported. What is imported stays, and with Python's
#: 700 looking is a twentieth of the start. With no collection at all a quarter of a MiB of garbage stays too.
_YOUNG_OBJECTS: Final = 20_000


def main() -> int:
    """Load what every worker needs, and run one."""
    os.environ.setdefault(*_BLAS_SPIN)
    usual = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS)
    from gpuserve_worker.process import run

    gc.freeze()
    gc.set_threshold(*usual)  # before any code of the user's
    return run()


if __name__ == "__main__":
    sys.exit(main())
