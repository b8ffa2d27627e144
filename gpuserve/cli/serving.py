"""The run of a server in this process: configuration, supervisor, signals, exit status."""

from __future__ import annotations

import dataclasses
import enum
import gc
import itertools
import logging
import os
import signal
import sys
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

from gpuserve.cli.exit_codes import ExitCode
from gpuserve.config.load import CONFIG_SUFFIXES
from gpuserve.config.repositories import CallableFlags, is_callable_path
from gpuserve.core.errors import GpuserveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuserve.config.load import Configuration
    from gpuserve.config.precedence import Override
    from gpuserve.config.repositories import FileRepository
    from gpuserve.config.triton.load import TritonRepository
    from gpuserve.supervisor.processes.child_process import EarlyFront
    from gpuserve.supervisor.supervisor import Supervisor


def is_target(target: str) -> bool:
    """Return whether the text can name something to serve: a callable, a path, or a config file name."""
    return is_callable_path(target) or os.path.exists(target) or target.endswith(CONFIG_SUFFIXES)


class ReloadMode(enum.Enum):
    """Sources of reloads besides SIGHUP and commands: none, changes of the models' files, or also keys."""

    NONE = "none"
    FILES = "files"
    FILES_AND_KEYS = "files and keys"


def serve_target(
    target: str,
    model_flags: CallableFlags,
    server: Sequence[Override],
    early: EarlyFront | None = None,
    reload_mode: ReloadMode = ReloadMode.NONE,
) -> int:
    """Serve a config file, a repository or a callable until a signal, and return the exit status. ``early``
    is a front process that was started before the configuration was read. Raise GpuserveError if the
    configuration is wrong, or the models cannot be served.
    """
    if is_callable_path(target):
        from gpuserve.config.repositories import CallableSource

        source = CallableSource(target, model_flags, server, os.environ)
        return serve_configuration(source.start, source, early, reload_mode)
    if os.path.isdir(target):
        return serve_repositories([target], server, early, reload_mode=reload_mode)
    from gpuserve.config.load import load_file
    from gpuserve.config.repositories import FileRepository

    configuration = load_file(target, os.environ, server)
    repository = FileRepository(target, os.environ, server, configuration)
    return serve_configuration(configuration, repository, early, reload_mode)


def serve_repositories(
    paths: Sequence[str],
    server: Sequence[Override],
    early: EarlyFront | None = None,
    remarks: Sequence[str] = (),
    reload_mode: ReloadMode = ReloadMode.NONE,
) -> int:
    """Serve Triton model repositories like ``serve_target``; ``remarks`` are logged as warnings."""
    from gpuserve.config.triton.load import TritonRepository

    repository = TritonRepository(paths, os.environ, server)
    start = dataclasses.replace(repository.start, remarks=(*remarks, *repository.start.remarks))
    return serve_configuration(start, repository, early, reload_mode)


def serve_configuration(
    configuration: Configuration,
    repository: FileRepository | TritonRepository | None,
    early: EarlyFront | None = None,
    reload_mode: ReloadMode = ReloadMode.NONE,
) -> int:
    """Run the supervisor until a signal, and return the exit status. Raise DeviceError or StartupError."""
    from gpuserve.cli.live.startup_view import CLOSING_TEXT, RELOADING_TEXT, startup_view
    from gpuserve.cli.live.terminal_keys import HELP, control_by_keys, has_terminal
    from gpuserve.cli.preflight import require_models, require_trace_output, with_devices
    from gpuserve.config.settings import logs
    from gpuserve.model.placement import ServerDevices
    from gpuserve.supervisor.models.declared_models import loaded_at_start
    from gpuserve.supervisor.processes.child_process import front_process
    from gpuserve.supervisor.processes.service_manager import ServiceManager
    from gpuserve.supervisor.reload.file_polling import FileWatch
    from gpuserve.supervisor.supervisor import Supervisor

    settings = configuration.settings
    if settings.log.file:
        _redirect_log(configuration)
    logs.configure(settings.log_format, settings.log_settings())
    devices = ServerDevices(numa_affinity=settings.numa_affinity)
    configuration = with_devices(configuration, devices)
    require_trace_output(configuration)
    require_models(configuration)
    logger = logging.getLogger(__name__)
    for line in configuration.remarks:
        logger.warning("%s", line)
    for name, reason in configuration.broken.items():
        logger.error("model %s is not served: %s", name, reason)
    try:
        shown = loaded_at_start(configuration.models, settings.load_at_start)
        closing = CLOSING_TEXT if reload_mode is ReloadMode.NONE else f"{RELOADING_TEXT} {CLOSING_TEXT}"
        if reload_mode is ReloadMode.FILES_AND_KEYS and has_terminal():
            closing = f"{RELOADING_TEXT} {HELP}"
        with startup_view(settings, shown, sys.stderr, closing) as view, ExitStack() as stack:
            supervisor = Supervisor(
                settings,
                configuration.models,
                view,
                relay_output=True,
                start_front=front_process if early is None else early.claim,
                repository=repository,
                devices=devices,
                config=repository,
                watch=None if reload_mode is ReloadMode.NONE else FileWatch(),
                manager=ServiceManager(os.environ),
            )
            install_signal_handlers(supervisor)
            if reload_mode is ReloadMode.FILES_AND_KEYS:
                stack.enter_context(control_by_keys(supervisor))
            gc.freeze()  # the imported modules live as long as the process; main() disabled collections
            gc.enable()
            return ExitCode.RUNTIME_FAILURE if supervisor.run() else ExitCode.OK
    except GpuserveError:
        raise
    except Exception:  # a bug: reported in the format of the log
        logger.exception("the server failed")
        return ExitCode.RUNTIME_FAILURE


def _redirect_log(configuration: Configuration) -> None:
    """Redirect stderr, and so the log of this process and its children, to the file of ``log.file``."""
    from gpuserve.config.problems import ConfigProblems

    path = configuration.settings.log.file
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        text = f"{path!r} cannot be written: {(error.strerror or 'unknown reason').lower()}"
        raise ConfigProblems([configuration.sources.problem(("server", "log", "file"), text)]) from None
    os.dup2(opened, sys.stderr.fileno())
    os.close(opened)


def install_signal_handlers(server: Supervisor) -> None:
    """Install signal handlers: SIGINT and SIGTERM drain and stop the server, a second one stops it at once,
    SIGHUP reloads the config. A closing terminal sends SIGHUP too, and stops the server. Under nohup SIGHUP
    stays ignored.
    """
    signals = itertools.count()

    def stop(number: int, _frame: FrameType | None) -> None:
        server.request_stop(fast=next(signals) > 0, terminated=number == signal.SIGTERM)

    had_terminal = _has_terminal()

    def hang_up(_number: int, _frame: FrameType | None) -> None:
        if had_terminal and not _has_terminal():
            server.request_stop()
        else:
            server.request_reload()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def _has_terminal() -> bool:
    """Return whether the process has a controlling terminal that is not closed."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(terminal)
    return True
