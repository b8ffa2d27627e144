"""Prints, and changes all of its process that user code can change."""

from __future__ import annotations

import locale
import os
import signal
import sys
from typing import Any

from gpuserve.decorators import batch


@batch
def noisy(x: Any) -> Any:
    print("a line of the user's")  # noqa: T201
    return {"y": x}


@batch
def rude(x: Any) -> Any:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.chdir("/")
    os.umask(0o777)
    locale.setlocale(locale.LC_ALL, "C")
    sys.stdout = sys.stderr = None
    return {"y": x}
