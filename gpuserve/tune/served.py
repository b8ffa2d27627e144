"""``python -m gpuserve.tune.served PARENT CONFIG OVERRIDES``: ``gpuserve serve CONFIG`` with other values.

``OVERRIDES`` is JSON, a list of paths and values. The server ends with its parent, whose pid is ``PARENT``,
however that ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any, Final

from gpuserve.config.load import Configuration, load_file
from gpuserve.config.messages import Origin
from gpuserve.config.precedence import Override
from gpuserve.errors import GpuserveError

_PR_SET_PDEATHSIG: Final = 1
_LABEL: Final = "gpuserve tune"


def configuration_of(config: str, values: Iterable[tuple[Iterable[str | int], Any]]) -> Configuration:
    """The configuration of a file with values at other paths in the place of its own.

    Raises:
        ConfigProblems: they do not go together.
    """
    overrides = [Override(tuple(path), value, _LABEL, Origin.FLAG) for path, value in values]
    return load_file(config, os.environ, overrides)


def main(parent: str, config: str, values: str) -> int:
    """Serve until SIGTERM; returns the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # it has died meanwhile
        return 1
    from gpuserve.cli.serve import serve_configuration

    try:
        return serve_configuration(configuration_of(config, json.loads(values)), None)
    except GpuserveError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
