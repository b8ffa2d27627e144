"""``gpuserve serve`` and ``gpuserve dev`` as typer reads them; plain command lines of ``serve``
are read by ``console/plain_command.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from gpuserve.cli.console import model_options, server_options
from gpuserve.cli.console.server_flags import overrides
from gpuserve.cli.console.serving import Following, is_target, serve_repositories, serve_target
from gpuserve.cli.console.starting_again import serve_until_it_can
from gpuserve.config.repositories import CallableFlags

if TYPE_CHECKING:
    from gpuserve.config.precedence import Override
    from gpuserve.supervisor.processes.child_process import EarlyFront

_Target = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        help="A config file, a model file, a callable (file.py:name or package.module:name), or a Triton "
        "model repository.",
        show_default=False,
    ),
]
_More = Annotated[
    list[str] | None,
    typer.Argument(metavar="[REPOSITORY]...", help="More model repositories.", show_default=False),
]
_Repositories = Annotated[
    list[str] | None,
    typer.Option("--model-repository", metavar="DIR", help="A Triton model repository; repeatable."),
]


@server_options.with_server_options
def serve(
    context: typer.Context,
    target: _Target = None,
    more: _More = None,
    repositories: _Repositories = None,
    name: model_options.Name = None,
    inputs: model_options.Inputs = None,
    outputs: model_options.Outputs = None,
    max_batch_size: model_options.MaxBatchSize = None,
    devices: model_options.Devices = None,
    instances: model_options.Instances = None,
    reload: Annotated[
        bool,
        typer.Option("--reload", help="Follow the files of the models, and load anew what changes."),
    ] = False,
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
    following = Following.FILES if reload else Following.NOT
    raise typer.Exit(_serve(target, folders, model_flags, overrides(flags), context.obj, following))


@server_options.with_server_options
def dev(
    context: typer.Context,
    target: _Target = None,
    more: _More = None,
    repositories: _Repositories = None,
    name: model_options.Name = None,
    inputs: model_options.Inputs = None,
    outputs: model_options.Outputs = None,
    max_batch_size: model_options.MaxBatchSize = None,
    devices: model_options.Devices = None,
    instances: model_options.Instances = None,
    **flags: str | bool | None,
) -> None:
    """Serve, and load anew each model whose files change, beside traffic.

    Followed are the files that a model's code imports, model files, the config and model repositories.
    A model that cannot be loaded from its new files goes on as it was; the error is shown.
    What is served, and the options, are those of `gpuserve serve`; `gpuserve serve --reload` has no keys.

    Keys, where there is a terminal: r loads all models anew, s shows the status, h helps, q ends the server.

    Examples:
      gpuserve dev config.yaml
      gpuserve dev model.py
    """
    model_flags = CallableFlags(name, inputs or (), outputs or (), max_batch_size, devices or (), instances)
    folders = [*(more or ()), *(repositories or ())]
    server = overrides(flags)
    raise typer.Exit(_serve(target, folders, model_flags, server, context.obj, Following.FILES_AND_KEYS))


def _serve(
    target: str | None,
    more: list[str],
    model_flags: CallableFlags,
    server: Sequence[Override],
    early: EarlyFront | None,
    following: Following,
) -> int:
    folders = [*([] if target is None else [target]), *more]
    if target is not None and not more:
        _check(target, model_flags)
        serve = partial(serve_target, target, model_flags, server, following=following)
    else:
        _check_folders(folders, model_flags)
        serve = partial(serve_repositories, folders, server, following=following)
    return serve(early) if following is Following.NOT else serve_until_it_can(serve, early, folders)


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
    if not is_target(target) and target.endswith(".py"):
        raise typer.BadParameter(f"there is no file {target!r}", param_hint="TARGET")
    if not is_target(target):
        raise typer.BadParameter(
            "expected a config file, a model file, a callable such as model.py:predict or a repository of "
            f"models, given {target!r}",
            param_hint="TARGET",
        )
    model_options.require_callable(target, model_flags)
