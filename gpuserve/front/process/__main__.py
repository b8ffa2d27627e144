"""``python -m gpuserve.front.process CONTROL_FD STACKS_FD``: a front process, started by the supervisor."""

from __future__ import annotations

import sys
from typing import Final

from gpuserve.front import process_setup

#: The messages of the protocol are two modules of this package. The package itself imports a client with
#: grpcio, which would take a fifth of the memory of a front that never uses it.
_CLIENT_PACKAGE: Final = "tritonclient.grpc"


def _load() -> process_setup.ProcessKind:
    process_setup.skip_package_code(_CLIENT_PACKAGE)
    from gpuserve.front.process.front import Front

    return Front


if __name__ == "__main__":
    process_setup.run_process(b"gs:front", int(sys.argv[1]), int(sys.argv[2]), _load)
