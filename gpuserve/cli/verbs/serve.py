"""``gpuserve serve``: from a command line to a running supervisor, and from its end to an exit status."""

from __future__ import annotations

import gc
import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gpuserve.cli.console import server_options
from gpuserve.cli.console.exit_codes import ExitCode
from gpuserve.cli.console.options import option
from gpuserve.errors import GpuserveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuserve.cli.console.callable_target import CallableFlags
    from gpuserve.config.load import Configuration
    from gpuserve.config.precedence import Override
    from gpuserve.config.repository import FileRepository
    from gpuserve.supervisor.core.processes import EarlyFront

_PANEL = "Model, when the target is a callable"
_CONFIG_SUFFIXES = (".yaml", ".yml", ".json")

_Devices = Annotated[
    list[str] | None,
    option(
        _PANEL,
        "cpu (default), cuda:0, …, cuda:* for every GPU, or a UUID; repeatable.",
        "--device",
        metavar="DEVICE",
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
    name: Annotated[str | None, option(_PANEL, "Name of the model; default the callable's.")] = None,
    inputs: Annotated[
        list[str] | None,
        option(_PANEL, "An input tensor; repeatable.", "--input", metavar="NAME:DTYPE:SHAPE"),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        option(_PANEL, "An output tensor; repeatable.", "--output", metavar="NAME:DTYPE:SHAPE"),
    ] = None,
    max_batch_size: Annotated[int | None, option(_PANEL, "Largest batch. Default 0: no batching.")] = None,
    devices: _Devices = None,
    instances: Annotated[int | None, option(_PANEL, "Processes on each device. Default 1.")] = None,
    **flags: str | None,
) -> None:
    """Serve the models of a config file, or one callable, until SIGTERM or Ctrl-C.

    A flag takes precedence over its environment variable, that over the file, that over the default.
    Variables name models as well: GPUSERVE_MODELS__LINEAR__MAX_BATCH_SIZE=32.

    Examples:
      gpuserve serve config.yaml --http-port 9000 --log-format json
      gpuserve serve model.py:predict --input x:float32:-1 --output y:float32:-1
      gpuserve serve model.py:predict --device cuda:0 --device cuda:1 --instances 2

    The callable of the third form may bring its own inputs, outputs, max_batch_size and array, as attributes:
      predict.inputs = [Tensor(name="x", dtype="float32", shape=(-1,))]

    SIGTERM or Ctrl-C finishes what is queued, a second one ends at once; SIGHUP reloads the config file.
    """
    from gpuserve.cli.console.callable_target import CallableFlags

    model_flags = CallableFlags(name, inputs or (), outputs or (), max_batch_size, devices or (), instances)
    server_flags = server_options.overrides(flags)
    configuration, repository = _load(target, model_flags, server_flags)
    raise typer.Exit(serve_configuration(configuration, repository, context.obj))


def _load(
    target: str, model_flags: CallableFlags, server: Sequence[Override]
) -> tuple[Configuration, FileRepository | None]:
    """Return the configuration, and where models are loaded from later on: nowhere for a callable."""
    from gpuserve.cli.console.callable_target import is_callable_path, load_callable
    from gpuserve.config.load import load_file

    if is_callable_path(target):
        return load_callable(target, model_flags, server, os.environ), None
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
    from gpuserve.config.repository import FileRepository

    configuration = load_file(target, os.environ, server)
    return configuration, FileRepository(target, os.environ, server, configuration)


def serve_configuration(
    configuration: Configuration, repository: FileRepository | None, early: EarlyFront | None = None
) -> int:
    """Run the supervisor here until a signal, and return the exit status; ``early`` is a front that already
    starts. DeviceError: no such device; StartupError: a model did not load, or a port is taken.
    """
    from gpuserve.cli.console.preflight import require_trace_output, with_devices
    from gpuserve.cli.console.signals import obey_signals
    from gpuserve.cli.console.startup_view import startup_view
    from gpuserve.placement.server_devices import ServerDevices
    from gpuserve.settings import logs
    from gpuserve.supervisor.core.processes import front_process
    from gpuserve.supervisor.models.repository import loaded_at_start
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
            gc.freeze()  # what is here now stays; the command line had collections wait for it
            gc.enable()
            return ExitCode.RUNTIME_FAILURE if supervisor.run() else ExitCode.OK
    except GpuserveError:
        raise
    except Exception:  # a fault of ours: it goes to the log, in the log's own format
        logging.getLogger(__name__).exception("the server failed")
        return ExitCode.RUNTIME_FAILURE
