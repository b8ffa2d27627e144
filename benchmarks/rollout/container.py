"""``python container.py PARENT COMMAND...``: becomes the command, which ends when its launcher does.

PARENT is the pid of the launcher, which may have died before this runs. The file stands alone: it is started
by its path, without the packages around it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: str, *command: str) -> None:
    """Does not return, unless the launcher is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() == int(parent):
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
