"""``gpuserve serve`` as typer reads it; plain command lines are read by ``console/plain_command.py``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from gpuserve.cli.console import server_options
from gpuserve.cli.console.options import option
from gpuserve.cli.console.server_flags import overrides
from gpuserve.cli.console.serving import is_target, serve_repositories, serve_target
from gpuserve.config.callable_target import CallableFlags, is_callable_path

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
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A config file, a model file, a callable (file.py:name or package.module:name), or a Triton "
            "model repository.",
            show_default=False,
        ),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REPOSITORY]...", help="More model repositories.", show_default=False),
    ] = None,
    repositories: Annotated[
        list[str] | None,
        typer.Option("--model-repository", metavar="DIR", help="A Triton model repository; repeatable."),
    ] = None,
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
    **flags: str | bool | None,
) -> None:
    """Serve the models of a config file or of Triton model repositories, a model file or one callable.

    A flag takes precedence over its environment variable, that over the file, that over the default.
    Variables name models as well: GPUSERVE_MODELS__LINEAR__MAX_BATCH_SIZE=32.

    Examples:
      gpuserve serve config.yaml --http-port 9000 --log-format json
      gpuserve serve model.py:predict --input x:float32:-1 --output y:float32:-1
      gpuserve serve model.onnx
      gpuserve serve model.py:predict --device cuda:0 --device cuda:1 --instances 2
      gpuserve serve models/

    A callable with types needs no tensors here, and the only one of a file no name:
      gpuserve serve model.py
    Without types it may bring its own inputs, outputs, max_batch_size and array, as attributes:
      predict.inputs = [Tensor(name="x", dtype="float32", shape=(-1,))]

    SIGTERM or Ctrl-C finishes what is queued, a second one ends at once; SIGHUP reloads the config file.
    """
    model_flags = CallableFlags(name, inputs or (), outputs or (), max_batch_size, devices or (), instances)
    folders = [*(more or ()), *(repositories or ())]
    if target is not None and not folders:
        _check(target, model_flags)
        raise typer.Exit(serve_target(target, model_flags, overrides(flags), context.obj))
    folders = [*([] if target is None else [target]), *folders]
    _check_folders(folders, model_flags)
    raise typer.Exit(serve_repositories(folders, overrides(flags), context.obj))


def _check_folders(folders: list[str], model_flags: CallableFlags) -> None:
    """Raise what typer tells as a wrong command line with model repositories."""
    if not folders:
        raise typer.BadParameter(
            "expected a config file, a callable such as model.py:predict, or a model repository",
            param_hint="TARGET",
        )
    for one in folders:
        if os.path.isfile(one) or ":" in one:
            raise typer.BadParameter(
                f"expected model repositories, which are folders, given {one!r}; only those can be several",
                param_hint="TARGET",
            )
    if model_flags.given():
        raise typer.BadParameter(
            f"{', '.join(model_flags.given())} can only be used with a callable such as model.py:predict; "
            "models of repositories are described by their config.pbtxt",
            param_hint="TARGET",
        )


def _check(target: str, model_flags: CallableFlags) -> None:
    """Raise what typer tells as a wrong command line."""
    if not is_target(target):
        raise typer.BadParameter(
            "expected a config file, a model file, a callable such as model.py:predict or a repository of "
            f"models, given {target!r}",
            param_hint="TARGET",
        )
    if model_flags.given() and not is_callable_path(target):
        raise typer.BadParameter(
            f"{', '.join(model_flags.given())} can only be used with a callable such as model.py:predict; "
            f"the models of {target} are described there",
            param_hint="TARGET",
        )
