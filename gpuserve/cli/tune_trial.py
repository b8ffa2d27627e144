"""``python -m gpuserve.cli.tune_trial PARENT CONFIG OVERRIDES``: the server of a trial of ``gpuserve tune``.
OVERRIDES is a JSON list of paths and values that replace those of CONFIG. The server ends with its parent,
the process with pid PARENT.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Final

from gpuserve.cli.bench.tune.tuning import trial_configuration
from gpuserve.core.errors import GpuserveError

_PR_SET_PDEATHSIG: Final = 1


def main(parent: str, config: str, values: str) -> int:
    """Serve until SIGTERM, and return the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before prctl
        return 1
    from gpuserve.cli.serving import serve_configuration

    try:
        return serve_configuration(trial_configuration(config, json.loads(values)), None)
    except GpuserveError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
