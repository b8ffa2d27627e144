"""``python -m gpuserve.front CONTROL_FD STACKS_FD``: a front process, as the supervisor starts it."""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

from gpuserve.front import interpreter
from gpuserve_worker.protocol.stacks import show_on_signal

#: The messages of the protocol are two modules of this package, which itself is a client: it brings grpcio,
#: a fifth of the memory of a front that never uses it.
_CLIENT_PACKAGE: Final = "tritonclient.grpc"


def main(argv: list[str]) -> int:
    """Run a front on the control socket whose descriptor is the first argument."""
    interpreter.begin()
    show_on_signal(int(argv[2]))
    control_fd = int(argv[1])
    os.set_inheritable(control_fd, False)

    import uvloop

    interpreter.make_bare(_CLIENT_PACKAGE)
    import gpuserve.front.process.front  # noqa: F401 - loaded before the collector is told what stays

    control = socket.socket(fileno=control_fd)
    interpreter.settle()
    uvloop.run(_run(control))
    return 0


async def _run(control: socket.socket) -> None:
    from gpuserve.front.process.front import Front

    await Front(control, interpreter.set_up, lambda: interpreter.leave(1)).run()
    # Nothing is left to be done; and grpc's server, taken apart, would cancel calls that have just come.
    interpreter.leave(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
