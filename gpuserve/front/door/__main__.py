"""``python -m gpuserve.front.door FD``: a door, as the supervisor starts it."""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

from gpuserve.front import process_setup
from gpuserve_worker.protocol.stacks import show_on_signal

_STDERR: Final = 2


def main(argv: list[str]) -> int:
    """Run a door on the control socket whose descriptor is the one argument."""
    process_setup.before_imports()
    show_on_signal(_STDERR)
    control_fd = int(argv[1])
    os.set_inheritable(control_fd, False)

    import uvloop

    import gpuserve.front.door.door  # noqa: F401 - loaded before the collector is told what stays

    control = socket.socket(fileno=control_fd)
    process_setup.after_imports()
    uvloop.run(_run(control))
    return 0


async def _run(control: socket.socket) -> None:
    from gpuserve.front.door.door import Door

    await Door(control, process_setup.apply_settings, lambda: process_setup.exit_process(1)).run()
    process_setup.exit_process(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
