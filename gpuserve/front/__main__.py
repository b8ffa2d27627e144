"""``python -m gpuserve.front CONTROL_FD STACKS_FD``: a front process, started by the supervisor."""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

from gpuserve.front import process_setup
from gpuserve_worker.protocol.stack_signals import show_on_signal

#: The messages of the protocol are two modules of this package. The package itself imports a client with
#: grpcio, which would take a fifth of the memory of a front that never uses it.
_CLIENT_PACKAGE: Final = "tritonclient.grpc"


def main(argv: list[str]) -> int:
    """Run a front on the control socket whose descriptor is the first argument."""
    process_setup.before_imports()
    show_on_signal(int(argv[2]))
    control_fd = int(argv[1])
    os.set_inheritable(control_fd, False)

    import uvloop

    process_setup.skip_package_code(_CLIENT_PACKAGE)
    import gpuserve.front.process.front  # noqa: F401 - loaded before the collector is told what stays

    control = socket.socket(fileno=control_fd)
    process_setup.after_imports()
    uvloop.run(_run(control))
    return 0


async def _run(control: socket.socket) -> None:
    from gpuserve.front.process.front import Front

    await Front(control, process_setup.apply_settings, lambda: process_setup.exit_process(1)).run()
    # Nothing is left to do, and an orderly shutdown of grpc's server would cancel calls that have just
    # arrived.
    process_setup.exit_process(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
