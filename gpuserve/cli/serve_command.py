"""``gpuserve serve`` and ``gpuserve dev``, parsed by typer, and the restart after wrong files."""

from __future__ import annotations

import copy
import inspect
import json
import os
import signal
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer
from typer.core import TyperCommand

from gpuserve.cli.exit_codes import exit_code_of, report_error
from gpuserve.cli.option_types import keyword, with_options
from gpuserve.cli.serve_command_line import (
    flag_name,
    former_flags,
    is_switch,
    negation,
    option_paths,
    overrides,
    parameter_name,
)
from gpuserve.cli.serving import ReloadMode, is_target, serve_repositories, serve_target
from gpuserve.config.entries import Scalar
from gpuserve.config.fingerprints import folders_in, package_folders, shallow_fingerprint
from gpuserve.config.precedence import variable_name
from gpuserve.config.problems import ConfigProblems, Origin
from gpuserve.config.repositories import CallableFlags, is_callable_path
from gpuserve.config.schema import key_at, kind_at
from gpuserve.config.settings import logs
from gpuserve.core.errors import ModelLoadError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpuserve.supervisor.processes.child_process import EarlyFront

_INDENT = 4
#: Metavars by the last word of a key, which names the unit or kind of its value.
_METAVARS = {"port": "PORT", "s": "TIME", "nbytes": "BYTES"}


class BlockCommand(TyperCommand):
    """A command whose help prints the options of the panel ``BLOCKS`` as blocks: a table is too narrow."""

    BLOCKS = "Server (each with its environment variable)"

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.console import Console, Group
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.text import Text

        panel = self.BLOCKS
        blocks: list[Any] = [one for one in self.params if getattr(one, "rich_help_panel", None) == panel]
        others = copy.copy(self)
        others.params = [one for one in self.params if one not in blocks]
        others.epilog = None
        super(BlockCommand, others).format_help(ctx, formatter)
        lines: list[RenderableType] = []
        for one in blocks:
            flags = Text(", ".join((*one.opts, *one.secondary_opts)), style="bold cyan")
            lines.append(flags.append(f" {one.metavar}" if one.metavar else "", style="bold yellow"))
            lines.append(Padding(Text(one.help), (0, 0, 0, _INDENT)))
        console = Console()
        console.print(Panel(Group(*lines), border_style="dim", title=panel, title_align="left"))
        if self.epilog:
            console.print(Padding(Text(self.epilog), 1))


def with_server_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a command that ends in ``**flags: str | bool | None`` an option for every key of ``server``."""
    return with_options(verb, map(_server_parameter, option_paths()))


def _server_parameter(path: tuple[str, ...]) -> inspect.Parameter:
    name = flag_name(path)
    metavar: str | None = _METAVARS.get(path[-1].rpartition("_")[2], "TEXT")
    if is_switch(path):
        name, metavar = f"{name}/{negation(path)}", None
    kind: Any = bool if metavar is None else str
    more = {"metavar": metavar, "show_default": False}
    parameter, text = parameter_name(path), _key_help(path)
    names = (name, *former_flags(path))
    return keyword(BlockCommand.BLOCKS, parameter, kind | None, None, text, *names, **more)


def _key_help(path: tuple[str, ...]) -> str:
    """Return the description, choices and default of a key, and on a line of its own its variable."""
    key, kind = key_at(("server", *path)), kind_at(("server", *path))
    words = kind.option.words if isinstance(kind, Scalar) and kind.is_text else ()
    choices = f" One of {', '.join(words)}." if words else ""
    default = key.default if isinstance(key.default, str) and key.default else json.dumps(key.default)
    return f"{key.description}{choices} Default {default}.\n{variable_name(('server', *path))}"


_PANEL = "Model, when the target is a callable"
_TENSOR = "NAME:DTYPE:SHAPE"


# fmt: off
_MODEL_OPTIONS: Final = (
    keyword(_PANEL, "name", str | None, None, "Name of the model; default the callable's."),
    keyword(_PANEL, "inputs", list[str] | None, None,
            "An input tensor; repeatable.", "--input", metavar=_TENSOR),
    keyword(_PANEL, "outputs", list[str] | None, None,
            "An output tensor; repeatable.", "--output", metavar=_TENSOR),
    keyword(_PANEL, "max_batch_size", int | None, None, "Largest batch. Default 0: no batching."),
    keyword(_PANEL, "devices", list[str] | None, None,
            "cpu (default), cuda:0, …, cuda:* for every GPU, auto for the emptiest, or a UUID; repeatable.",
            "--device", metavar="DEVICE"),
    keyword(_PANEL, "instances", int | None, None, "Processes on each device. Default 1."),
)
# fmt: on


def with_model_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a command that ends in ``**flags`` the options that describe a callable's model."""
    return with_options(verb, _MODEL_OPTIONS)


def model_flags(flags: dict[str, Any]) -> CallableFlags:
    """Remove the options of ``with_model_options`` from the options of a command, and return them."""
    name, inputs, outputs, size, devices, instances = (flags.pop(one.name) for one in _MODEL_OPTIONS)
    return CallableFlags(name, inputs or (), outputs or (), size, devices or (), instances)


def require_callable(target: str, flags: CallableFlags) -> None:
    """Raise BadParameter if model options are given for a target that describes its models itself."""
    if flags.given() and not is_callable_path(target):
        only = f"{', '.join(flags.given())} can only be used with a callable such as model.py:predict"
        raise typer.BadParameter(f"{only}; the models of {target} are described there", param_hint="TARGET")


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


@with_server_options
@with_model_options
def serve(
    context: typer.Context,
    target: _Target = None,
    more: _More = None,
    repositories: _Repositories = None,
    reload: Annotated[
        bool,
        typer.Option("--reload", help="Watch the files of the models, and reload each model that changes."),
    ] = False,
    **flags: Any,
) -> None:
    """Serve a config file, Triton model repositories, a model file or one callable.

    A flag takes precedence over its environment variable, that over the file, that over the default.
    Variables can name models as well: GPUSERVE_MODELS__LINEAR__MAX_BATCH_SIZE=32.

    Examples:
      gpuserve serve config.yaml --http-port 9000 --log-format json
      gpuserve serve model.py:predict --input x:float32:-1 --output y:float32:-1
      gpuserve serve model.onnx
      gpuserve serve model.py:predict --device cuda:0 --instances 2
      gpuserve serve models/

    A callable with types needs no tensors here, and the only callable of a file needs no name:
      gpuserve serve model.py
    Without types a callable can have attributes inputs, outputs, max_batch_size and array:
      predict.inputs = [Tensor(name="x", dtype="float32", shape=(-1,))]

    SIGTERM or Ctrl-C finishes queued requests, a second one ends at once; SIGHUP reloads the config file.
    """
    reload_mode = ReloadMode.FILES if reload else ReloadMode.NONE
    folders = [*(more or ()), *(repositories or ())]
    raise typer.Exit(_serve(target, folders, flags, context.obj, reload_mode))


@with_server_options
@with_model_options
def dev(
    context: typer.Context,
    target: _Target = None,
    more: _More = None,
    repositories: _Repositories = None,
    **flags: Any,
) -> None:
    """Serve, and reload each model whose files change, without interrupting traffic.

    Watched are the files that a model's code imports, model files, the config and model repositories.
    If the new files of a model cannot be loaded, the old model serves on, and the error is shown.
    Targets and options are those of `gpuserve serve`; `gpuserve serve --reload` has no keys.

    Keys of the terminal: r reloads all models, s shows the status, h shows help, q stops the server.

    Examples:
      gpuserve dev config.yaml
      gpuserve dev model.py
    """
    folders = [*(more or ()), *(repositories or ())]
    raise typer.Exit(_serve(target, folders, flags, context.obj, ReloadMode.FILES_AND_KEYS))


def _serve(
    target: str | None,
    more: list[str],
    flags: dict[str, Any],
    early: EarlyFront | None,
    reload_mode: ReloadMode,
) -> int:
    described, server = model_flags(flags), overrides(flags)
    folders = [*([] if target is None else [target]), *more]
    if target is not None and not more:
        if not is_target(target):
            if target.endswith(".py"):
                raise _wrong_target(f"there is no file {target!r}")
            expected = "expected a config file, a model file, a callable such as model.py:predict"
            raise _wrong_target(f"{expected} or a repository of models, given {target!r}")
        require_callable(target, described)
        serve = partial(serve_target, target, described, server, reload_mode=reload_mode)
    else:
        _check_folders(folders, described)
        serve = partial(serve_repositories, folders, server, reload_mode=reload_mode)
    return serve(early) if reload_mode is ReloadMode.NONE else serve_with_restarts(serve, early, folders)


def _wrong_target(text: str) -> typer.BadParameter:
    return typer.BadParameter(text, param_hint="TARGET")


def _check_folders(folders: list[str], described: CallableFlags) -> None:
    if not folders:
        expected = "expected a config file, a callable such as model.py:predict, or a model repository"
        raise _wrong_target(expected)
    for one in folders:
        if os.path.isfile(one) or ":" in one:
            expected = "expected model repositories, which are folders"
            raise _wrong_target(f"{expected}, given {one!r}; only those can be several")
    if described.given():
        only = "can only be used with a callable such as model.py:predict"
        where = "models of repositories are described by their config.pbtxt"
        raise _wrong_target(f"{', '.join(described.given())} {only}; {where}")


#: Fingerprints of the watched folders, taken before the server starts.
Fingerprints: TypeAlias = Mapping[str, Hashable]
#: Seconds between comparisons of the files. They find changes from before the watch began, and every change
#: where the system has no more file watches.
_POLL_S: Final = 0.5


def serve_with_restarts(
    serve: Callable[[EarlyFront | None], int], early: EarlyFront | None, targets: Sequence[str]
) -> int:
    """Serve, and return the exit status. If a file is wrong, wait for its change and serve again. Raise
    GpuserveError if the server failed for a reason that no change of a file can remove.

    No process writes byte code meanwhile: byte code of a file that changes again within the same second would
    be taken for that of the new content.
    """
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    while True:
        before = _fingerprints(targets)
        try:
            return serve(early)
        except (ConfigProblems, ModelLoadError) as error:
            is_flag = isinstance(error, ConfigProblems) and any(
                one.origin is Origin.FLAG and one.label not in targets for one in error.problems
            )
            if is_flag or not all(map(os.path.exists, map(_file_of, targets))):
                raise
            report_error(error)
            status = exit_code_of(error)
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_, ended=ended: ended.set())
        logs.write_lines("Waiting for a change of the files; Ctrl-C stops.\n")
        if not _wait_for_change(targets, before, ended):
            return status


def _file_of(target: str) -> str:
    """Return the file or folder of a target; for a module, the current folder."""
    place = target if os.path.exists(target) else target.rpartition(":")[0]
    return place if os.path.exists(place) or place.endswith(".py") or not place else "."


def _wait_for_change(targets: Sequence[str], before: Fingerprints, ended: threading.Event) -> bool:
    """Wait until a watched folder differs from ``before``; return False if a signal comes first."""
    from gpuserve.supervisor.reload.file_polling import FileWatch

    woken = threading.Event()
    with closing(FileWatch()) as watch:
        watch.open(woken.set)
        watch.watch(_watched_folders(targets))
        while not ended.is_set():
            if _fingerprints(targets) != before:
                return True
            woken.wait(_POLL_S)
            woken.clear()
    return False


def _fingerprints(targets: Sequence[str]) -> Fingerprints:
    return {one: shallow_fingerprint(one) for one in _watched_folders(targets)}


def _watched_folders(targets: Sequence[str]) -> set[str]:
    found = {os.getcwd()}
    for path in map(os.path.abspath, map(_file_of, targets)):
        found.update(folders_in(path) if os.path.isdir(path) else [os.path.dirname(path)])
    return found.union(*map(package_folders, found))
