"""``gpuserve serve`` as typer reads it; plain command lines are read by ``console/plain_command.py``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuserve.cli.console import server_options
from gpuserve.cli.console.callable_target import CallableFlags, is_callable_path
from gpuserve.cli.console.options import option
from gpuserve.cli.console.server_flags import overrides
from gpuserve.cli.console.serving import is_target, serve_target

_PANEL = "Model, when the target is a callable"

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
            metavar="TARGET",
            help="A config file, a model file, or a callable: file.py:name or package.module:name.",
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
    """Serve the models of a config file, a model file or one callable, until SIGTERM or Ctrl-C.

    A flag takes precedence over its environment variable, that over the file, that over the default.
    Variables name models as well: GPUSERVE_MODELS__LINEAR__MAX_BATCH_SIZE=32.

    Examples:
      gpuserve serve config.yaml --http-port 9000 --log-format json
      gpuserve serve model.py:predict --input x:float32:-1 --output y:float32:-1
      gpuserve serve model.onnx
      gpuserve serve model.py:predict --device cuda:0 --device cuda:1 --instances 2

    A callable may bring its own inputs, outputs, max_batch_size and array, as attributes:
      predict.inputs = [Tensor(name="x", dtype="float32", shape=(-1,))]

    SIGTERM or Ctrl-C finishes what is queued, a second one ends at once; SIGHUP reloads the config file.
    """
    model_flags = CallableFlags(name, inputs or (), outputs or (), max_batch_size, devices or (), instances)
    _check(target, model_flags)
    raise typer.Exit(serve_target(target, model_flags, overrides(flags), context.obj))


def _check(target: str, model_flags: CallableFlags) -> None:
    """Raise what typer tells as a wrong command line."""
    if not is_target(target):
        raise typer.BadParameter(
            f"expected a config file, a model file or a callable such as model.py:predict, given {target!r}",
            param_hint="TARGET",
        )
    if model_flags.given() and not is_callable_path(target):
        raise typer.BadParameter(
            f"{', '.join(model_flags.given())} can only be used with a callable such as model.py:predict; "
            f"the models of {target} are described in the file",
            param_hint="TARGET",
        )
