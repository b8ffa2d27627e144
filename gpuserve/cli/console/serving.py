"""From a target and its flags to a running supervisor, and from its end to an exit status."""

from __future__ import annotations

import dataclasses
import enum
import gc
import logging
import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gpuserve.cli.console.exit_codes import ExitCode
from gpuserve.config.load import CONFIG_SUFFIXES
from gpuserve.config.repositories import CallableFlags, is_callable_path
from gpuserve.core.errors import GpuserveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuserve.config.load import Configuration
    from gpuserve.config.precedence import Override
    from gpuserve.config.repositories import CallableSource, FileRepository
    from gpuserve.config.triton.load import TritonRepository
    from gpuserve.supervisor.processes.child_process import EarlyFront


def is_target(target: str) -> bool:
    """Whether there may be something to serve: a callable, or a config file, as its name says or as it is."""
    return is_callable_path(target) or os.path.exists(target) or target.endswith(CONFIG_SUFFIXES)


class Following(enum.Enum):
    """Whether a server follows the files of its models, and obeys keys."""

    NOT = "not"
    FILES = "files"
    FILES_AND_KEYS = "files and keys"


def serve_target(
    target: str,
    model_flags: CallableFlags,
    server: Sequence[Override],
    early: EarlyFront | None = None,
    following: Following = Following.NOT,
) -> int:
    """Serve a config file or a callable until a signal, and return the exit status; ``early`` is a front that
    already starts. GpuserveError: the configuration is wrong, or it cannot be served.
    """
    if is_callable_path(target):
        from gpuserve.config.repositories import CallableSource

        source = CallableSource(target, model_flags, server, os.environ)
        return serve_configuration(source.start, source, early, following)
    if os.path.isdir(target):
        return serve_repositories([target], server, early, following=following)
    from gpuserve.config.load import load_file
    from gpuserve.config.repositories import FileRepository

    configuration = load_file(target, os.environ, server)
    repository = FileRepository(target, os.environ, server, configuration)
    return serve_configuration(configuration, repository, early, following)


def serve_repositories(
    paths: Sequence[str],
    server: Sequence[Override],
    early: EarlyFront | None = None,
    remarks: Sequence[str] = (),
    following: Following = Following.NOT,
) -> int:
    """Serve model repositories until a signal, and return the exit status, as ``serve_target``; ``remarks``
    are for the log.
    """
    from gpuserve.config.triton.load import TritonRepository

    repository = TritonRepository(paths, os.environ, server)
    start = dataclasses.replace(repository.start, remarks=(*remarks, *repository.start.remarks))
    return serve_configuration(start, repository, early, following)


def serve_configuration(
    configuration: Configuration,
    repository: FileRepository | TritonRepository | CallableSource | None,
    early: EarlyFront | None = None,
    following: Following = Following.NOT,
) -> int:
    """Run the supervisor here until a signal, and return the exit status; ``early`` is a front that already
    starts. DeviceError: no such device; StartupError: a model did not load, or a port is taken.
    """
    from gpuserve.cli.console.keys import HELP, has_terminal, keys_of
    from gpuserve.cli.console.preflight import require_models, require_trace_output, with_devices
    from gpuserve.cli.console.signals import obey_signals
    from gpuserve.cli.views.startup_view import ENDING, FOLLOWING, startup_view
    from gpuserve.config.settings import logs
    from gpuserve.supervisor.models.declared_models import loaded_at_start
    from gpuserve.supervisor.placement import ServerDevices
    from gpuserve.supervisor.processes.child_process import front_process
    from gpuserve.supervisor.reload.file_polling import FileWatch
    from gpuserve.supervisor.supervisor import Supervisor

    settings = configuration.settings
    logs.configure(settings.log_format, settings.log_level)
    devices = ServerDevices(numa_affinity=settings.numa_affinity)
    configuration = with_devices(configuration, devices)
    require_trace_output(configuration)
    require_models(configuration)
    _tell_of_repository(configuration)
    try:
        shown = loaded_at_start(configuration.models, settings.load_at_start)
        closing = ENDING if following is Following.NOT else f"{FOLLOWING} {ENDING}"
        if following is Following.FILES_AND_KEYS and has_terminal():
            closing = f"{FOLLOWING} {HELP}"
        with startup_view(settings.log_format, shown, sys.stderr, closing) as view, ExitStack() as stack:
            supervisor = Supervisor(
                settings,
                configuration.models,
                view,
                relay_output=True,
                start_front=front_process if early is None else early.claim,
                repository=repository,
                devices=devices,
                config=repository,
                watch=None if following is Following.NOT else FileWatch(),
            )
            obey_signals(supervisor)
            if following is Following.FILES_AND_KEYS:
                stack.enter_context(keys_of(supervisor))
            gc.freeze()  # what is here now stays; the command line had collections wait for it
            gc.enable()
            return ExitCode.RUNTIME_FAILURE if supervisor.run() else ExitCode.OK
    except GpuserveError:
        raise
    except Exception:  # a fault of ours: it goes to the log, in the log's own format
        logging.getLogger(__name__).exception("the server failed")
        return ExitCode.RUNTIME_FAILURE


def _tell_of_repository(configuration: Configuration) -> None:
    """Log which models are not served, and which of their fields have no effect."""
    logger = logging.getLogger(__name__)
    for line in configuration.remarks:
        logger.warning("%s", line)
    for name, reason in configuration.broken.items():
        logger.error("model %s is not served: %s", name, reason)
