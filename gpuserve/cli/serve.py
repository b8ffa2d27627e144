"""``gpuserve serve``: from a command line to a running supervisor, and from its end to an exit status."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gpuserve.cli import server_options
from gpuserve.cli.exit_codes import ExitCode
from gpuserve.errors import GpuserveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuserve.cli.callable_target import CallableFlags
    from gpuserve.config.load import Configuration
    from gpuserve.config.precedence import Override
    from gpuserve.config.repository import FileRepository
    from gpuserve.supervisor.front_process import EarlyFront

_PANEL = "Model, when the target is a callable"
_CONFIG_SUFFIXES = (".yaml", ".yml", ".json")

_Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="cpu (default), cuda:0, …, cuda:* for every GPU, or a UUID; repeatable.",
        rich_help_panel=_PANEL,
    ),
]


@server_options.with_server_options
def serve(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="A config file, or a callable: file.py:name or package.module:name."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the model; default the callable's.", rich_help_panel=_PANEL)
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="NAME:DTYPE:SHAPE", help="An input tensor; repeatable.", rich_help_panel=_PANEL
        ),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output",
            metavar="NAME:DTYPE:SHAPE",
            help="An output tensor; repeatable.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Largest batch. Default 0: no batching.", rich_help_panel=_PANEL)
    ] = None,
    devices: _Devices = None,
    instances: Annotated[
        int | None, typer.Option(help="Processes on each device. Default 1.", rich_help_panel=_PANEL)
    ] = None,
    **flags: str | None,
) -> None:
    """Serve the models of a config file, or one callable, until SIGTERM or Ctrl-C.

    A flag goes before its environment variable, that before the file, that before the default.
    Variables name models as well: GPUSERVE_MODELS__LINEAR__MAX_BATCH_SIZE=32.

    Examples:
      gpuserve serve config.yaml --http-port 9000 --log-format json
      gpuserve serve model.py:predict --input x:float32:-1 --output y:float32:-1
      gpuserve serve model.py:predict --device cuda:0 --device cuda:1 --instances 2

    The callable of the third form may bring its own inputs, outputs, max_batch_size and array, as attributes:
      predict.inputs = [Tensor(name="x", dtype="float32", shape=(-1,))]

    SIGTERM or Ctrl-C finishes what is queued, a second one ends at once; SIGHUP reloads the config file.
    """
    from gpuserve.cli.callable_target import CallableFlags

    model_flags = CallableFlags(name, inputs or (), outputs or (), max_batch_size, devices or (), instances)
    server_flags = server_options.overrides(flags)
    raise typer.Exit(_serve_target(target, model_flags, server_flags, context.obj))


def _serve_target(
    target: str, model_flags: CallableFlags, server: Sequence[Override], front: EarlyFront | None
) -> int:
    """Serve what the target says; the exit code."""
    configuration = _load(target, model_flags, server)
    return serve_configuration(configuration, _repository(configuration, target, server), front)


def _load(target: str, model_flags: CallableFlags, server: Sequence[Override]) -> Configuration:
    from gpuserve.cli.callable_target import is_callable_path, load_callable
    from gpuserve.config.load import load_file

    if is_callable_path(target):
        return load_callable(target, model_flags, server, os.environ)
    if not os.path.exists(target) and not target.endswith(_CONFIG_SUFFIXES):
        raise typer.BadParameter(
            f"expected a config file or a callable such as model.py:predict, given {target!r}",
            param_hint="TARGET",
        )
    if model_flags.given():
        raise typer.BadParameter(
            f"{', '.join(model_flags.given())} can only be used with a callable such as model.py:predict; "
            f"the models of {target} are described in the file",
            param_hint="TARGET",
        )
    return load_file(target, os.environ, server)


def _repository(
    configuration: Configuration, target: str, server: Sequence[Override]
) -> FileRepository | None:
    """Where models are loaded from later on; a callable stays what it is."""
    from gpuserve.cli.callable_target import is_callable_path
    from gpuserve.config.repository import FileRepository

    if is_callable_path(target):
        return None
    return FileRepository(target, os.environ, server, configuration)


def serve_configuration(
    configuration: Configuration, repository: FileRepository | None, early: EarlyFront | None = None
) -> int:
    """Run the supervisor in this thread until a signal ends it; returns the exit status.

    ``early`` is a front that is already starting.

    Raises:
        DeviceError: a device that this machine does not have.
        StartupError: a model did not load, or a port is taken.
    """
    from gpuserve import logs
    from gpuserve.cli.preflight import require_trace_output, with_devices
    from gpuserve.cli.signals import obey_signals
    from gpuserve.cli.startup_view import startup_view
    from gpuserve.devices.server_devices import ServerDevices
    from gpuserve.supervisor.front_process import front_process
    from gpuserve.supervisor.repository import loaded_at_start
    from gpuserve.supervisor.supervisor import Supervisor

    settings = configuration.settings
    logs.configure(settings.log_format, settings.log_level)
    devices = ServerDevices(numa_affinity=settings.numa_affinity)
    configuration = with_devices(configuration, devices)
    require_trace_output(configuration)
    try:
        shown = loaded_at_start(configuration.models, settings.load_at_start)
        with startup_view(settings.log_format, shown, sys.stderr) as view:
            supervisor = Supervisor(
                settings,
                configuration.models,
                view,
                relay_output=True,
                start_front=front_process if early is None else early.take,
                repository=repository,
                devices=devices,
                config=repository,
            )
            obey_signals(supervisor)
            return ExitCode.RUNTIME_FAILURE if supervisor.run() else ExitCode.OK
    except GpuserveError:
        raise
    except Exception:  # a fault of ours: it goes to the log, in the log's own format
        logging.getLogger(__name__).exception("the server failed")
        return ExitCode.RUNTIME_FAILURE
