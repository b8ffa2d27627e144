"""``python -m gpuserve.front.ingress FD``: an ingress process, started by the supervisor."""

from __future__ import annotations

import sys
from typing import Final

from gpuserve.front import process_setup

_STDERR: Final = 2


def _load() -> process_setup.ProcessKind:
    from gpuserve.front.ingress.ingress_process import IngressProcess

    return IngressProcess


if __name__ == "__main__":
    process_setup.run_process(b"gs:ingress", int(sys.argv[1]), _STDERR, _load)
