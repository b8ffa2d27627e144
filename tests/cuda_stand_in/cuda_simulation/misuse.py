"""What CUDA does not define, and what would show on a GPU only sometimes: here it ends the process, and says
who did what. Other mistakes have an error of CUDA's.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import NoReturn


def undefined(what: str) -> NoReturn:
    """End this process, which does what is not defined."""
    sys.stderr.write(f"stand-in for CUDA: undefined behaviour: {what}\n")
    sys.stderr.flush()
    if not faulthandler.is_enabled():  # else it does so by itself
        faulthandler.dump_traceback(all_threads=False)
    os.abort()
