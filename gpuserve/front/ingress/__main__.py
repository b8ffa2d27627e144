"""``python -m gpuserve.front.ingress FD``: an ingress process, started by the supervisor."""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

from gpuserve.front import process_setup
from gpuserve_worker.protocol.stack_signals import show_on_signal

_STDERR: Final = 2


def main(argv: list[str]) -> int:
    """Run an ingress process on the control socket whose descriptor is the only argument."""
    process_setup.before_imports()
    show_on_signal(_STDERR)
    control_fd = int(argv[1])
    os.set_inheritable(control_fd, False)

    import uvloop

    import gpuserve.front.ingress.ingress_process  # noqa: F401 - loaded before the collector freezes its objects

    control = socket.socket(fileno=control_fd)
    process_setup.after_imports()
    uvloop.run(_run(control))
    return 0


async def _run(control: socket.socket) -> None:
    from gpuserve.front.ingress.ingress_process import IngressProcess

    await IngressProcess(control, process_setup.apply_settings, lambda: process_setup.exit_process(1)).run()
    process_setup.exit_process(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
