"""The options that describe the one model of a target that is a callable, for every verb that takes one."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from gpuserve.cli.console.options import integer, option
from gpuserve.config.repositories import CallableFlags, is_callable_path

_PANEL = "Model, when the target is a callable"

Name: TypeAlias = Annotated[str | None, option(_PANEL, "Name of the model; default the callable's.")]
Inputs: TypeAlias = Annotated[
    list[str] | None,
    option(_PANEL, "An input tensor; repeatable.", "--input", metavar="NAME:DTYPE:SHAPE"),
]
Outputs: TypeAlias = Annotated[
    list[str] | None,
    option(_PANEL, "An output tensor; repeatable.", "--output", metavar="NAME:DTYPE:SHAPE"),
]
MaxBatchSize: TypeAlias = Annotated[int | None, integer(_PANEL, "Largest batch. Default 0: no batching.")]
Devices: TypeAlias = Annotated[
    list[str] | None,
    option(
        _PANEL,
        "cpu (default), cuda:0, …, cuda:* for every GPU, or a UUID; repeatable.",
        "--device",
        metavar="DEVICE",
    ),
]
Instances: TypeAlias = Annotated[int | None, integer(_PANEL, "Processes on each device. Default 1.")]


def require_callable(target: str, flags: CallableFlags) -> None:
    """Refuse the options with a target that describes its models itself."""
    if flags.given() and not is_callable_path(target):
        raise typer.BadParameter(
            f"{', '.join(flags.given())} can only be used with a callable such as model.py:predict; "
            f"the models of {target} are described there",
            param_hint="TARGET",
        )
