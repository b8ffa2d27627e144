"""``python -m gpuserve.cli.verbs.trial_served PARENT CONFIG OVERRIDES``: serves CONFIG with other values, a
JSON list of paths and values. The server ends with its parent, whose pid is ``PARENT``, however that ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Final

from gpuserve.core.errors import GpuserveError
from gpuserve.tune.trial_server import configuration_of

_PR_SET_PDEATHSIG: Final = 1


def main(parent: str, config: str, values: str) -> int:
    """Serve until SIGTERM; returns the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # it has died meanwhile
        return 1
    from gpuserve.cli.console.serving import serve_configuration

    try:
        return serve_configuration(configuration_of(config, json.loads(values)), None)
    except GpuserveError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
