"""Exit statuses of ``gpuserve``, and the report of an error. Scripts and unit files depend on the numbers."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterator
from typing import Final

from gpuserve.core.errors import (
    ConfigError,
    ControlError,
    DeviceError,
    GpuserveError,
    ModelUnrecoverable,
    StartupError,
)

#: The status that a shell reports for a command ended by SIGINT; not an ``ExitCode``.
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
    ExitCode.OK: "success, or a clean stop after SIGTERM or SIGINT",
    ExitCode.RUNTIME_FAILURE: "the server or the command failed; bench, doctor: found a fault",
    ExitCode.USAGE: "wrong command line",
    ExitCode.STARTUP_FAILURE: "a model failed to load, or a port is in use",
    ExitCode.BAD_CONFIG: "wrong configuration",
    ExitCode.NO_SUCH_DEVICE: "a device of a model, or a library for the device, is missing",
    ExitCode.MODEL_UNRECOVERABLE: "a model raised UnrecoverableError",
}


def help_text() -> str:
    return "Exit status:\n" + "\n".join(f"  {code.value}  {text}" for code, text in MEANINGS.items())


def exit_code_of(error: GpuserveError) -> ExitCode:
    match error:
        case ConfigError():
            return ExitCode.USAGE if getattr(error, "only_flags", False) else ExitCode.BAD_CONFIG
        case DeviceError():
            return ExitCode.NO_SUCH_DEVICE
        case StartupError():
            return ExitCode.STARTUP_FAILURE
        case ModelUnrecoverable():
            return ExitCode.MODEL_UNRECOVERABLE
    return ExitCode.RUNTIME_FAILURE


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """End the command on a ``ControlError``, which is reported, and on Ctrl-C, its usual end."""
    import typer

    try:
        yield
    except ControlError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(ExitCode.RUNTIME_FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.OK) from None


def report_error(error: GpuserveError) -> None:
    """Write the text of an error to stderr, as a JSON line if the log is JSON."""
    import logging

    from gpuserve.config.settings import logs

    if logs.configured_format() == "json":
        logging.getLogger(__name__).error("%s", error)
    else:
        logs.write_lines(f"{error}\n")
