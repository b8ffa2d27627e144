"""How a verb that failed says so: by a text, and by an exit status."""

from __future__ import annotations

import logging

from gpuserve.cli.console.exit_codes import ExitCode
from gpuserve.config.settings import logs
from gpuserve.core.errors import ConfigError, DeviceError, GpuserveError, ModelUnrecoverable, StartupError


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


def tell(error: GpuserveError) -> GpuserveError:
    """Write the text of an error to stderr; a log that is JSON stays JSON to the last line."""
    if logs.configured_format() == "json":
        logging.getLogger(__name__).error("%s", error)
    else:
        logs.write(f"{error}\n")
    return error
