"""What the exit status of ``gpuserve`` says. Scripts and unit files depend on the numbers."""

from __future__ import annotations

import enum
from typing import Final

#: Not of the table: as a shell says it of a command that SIGINT ends.
INTERRUPTED: Final = 130


class ExitCode(enum.IntEnum):
    OK = 0
    RUNTIME_FAILURE = 1
    USAGE = 2
    STARTUP_FAILURE = 3
    BAD_CONFIG = 4
    NO_SUCH_DEVICE = 5
    MODEL_UNRECOVERABLE = 6


MEANINGS = {
    ExitCode.OK: "success; also a clean stop by SIGTERM or SIGINT",
    ExitCode.RUNTIME_FAILURE: "the server failed, or what was asked of it; bench, doctor: a finding",
    ExitCode.USAGE: "wrong command line",
    ExitCode.STARTUP_FAILURE: "a model did not load, or a port is taken",
    ExitCode.BAD_CONFIG: "the configuration is wrong",
    ExitCode.NO_SUCH_DEVICE: "a model needs a device, or a library for it, that is not there",
    ExitCode.MODEL_UNRECOVERABLE: "a model said that it cannot go on (UnrecoverableError)",
}


def help_text() -> str:
    return "Exit status:\n" + "\n".join(f"  {code.value}  {text}" for code, text in MEANINGS.items())
