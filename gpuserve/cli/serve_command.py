"""``gpuserve serve`` and ``gpuserve dev``, parsed by typer, and the restart after wrong files."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from gpuserve.cli.exit_codes import exit_code_of, report_error
from gpuserve.cli.serve_command_line import overrides
from gpuserve.cli.serve_options import model_flags, require_callable, with_model_options, with_server_options
from gpuserve.cli.serving import ReloadMode, is_target, serve_repositories, serve_target
from gpuserve.config.fingerprints import folders_in, package_folders, shallow_fingerprint
from gpuserve.config.problems import ConfigProblems, Origin
from gpuserve.config.repositories import CallableFlags
from gpuserve.config.settings import logs
from gpuserve.core.errors import ModelLoadError

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
      gpuserve serve model.py:predict --device cuda:0 --device cuda:1 --instances 2
      gpuserve serve models/

    A callable with types needs no tensors here, and the only callable of a file needs no name:
      gpuserve serve model.py
    Without types a callable can have attributes inputs, outputs, max_batch_size and array:
      predict.inputs = [Tensor(name="x", dtype="float32", shape=(-1,))]

    SIGTERM or Ctrl-C finishes queued requests, a second one ends at once; SIGHUP reloads the config file.
    """
    described = model_flags(flags)
    folders = [*(more or ()), *(repositories or ())]
    reload_mode = ReloadMode.FILES if reload else ReloadMode.NONE
    raise typer.Exit(_serve(target, folders, described, overrides(flags), context.obj, reload_mode))


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
    described = model_flags(flags)
    folders = [*(more or ()), *(repositories or ())]
    server = overrides(flags)
    raise typer.Exit(_serve(target, folders, described, server, context.obj, ReloadMode.FILES_AND_KEYS))


def _serve(
    target: str | None,
    more: list[str],
    described: CallableFlags,
    server: Sequence[Override],
    early: EarlyFront | None,
    reload_mode: ReloadMode,
) -> int:
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
#: Interval between comparisons, which find changes from before the watch began.
_POLL_MS: Final = 500
#: Interval between comparisons if the system has no more file watches.
_UNWATCHED_POLL_S: Final = 1.0


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
        logs.write("Waiting for a change of the files; Ctrl-C stops.\n")
        if not _wait_for_change(targets, before, ended):
            return status


def _file_of(target: str) -> str:
    """Return the file or folder of a target; for a module, the current folder."""
    place = target if os.path.exists(target) else target.rpartition(":")[0]
    return place if os.path.exists(place) or place.endswith(".py") or not place else "."


def _wait_for_change(targets: Sequence[str], before: Fingerprints, ended: threading.Event) -> bool:
    """Wait until a watched folder differs from ``before``; return False if a signal comes first."""
    from watchfiles import watch  # an import that only this server needs

    changes = watch(
        *sorted(_watched_folders(targets)), debounce=400, step=50, rust_timeout=_POLL_MS,
        yield_on_timeout=True, recursive=False, stop_event=ended, raise_interrupt=False,
    )  # fmt: skip
    with suppress(OSError, RuntimeError):  # the limit of file watches is reached
        return any(_fingerprints(targets) != before for _ in changes)
    while not ended.wait(_UNWATCHED_POLL_S):
        if _fingerprints(targets) != before:
            return True
    return False


def _fingerprints(targets: Sequence[str]) -> Fingerprints:
    return {one: shallow_fingerprint(one) for one in _watched_folders(targets)}


def _watched_folders(targets: Sequence[str]) -> set[str]:
    found = {os.getcwd()}
    for path in map(os.path.abspath, map(_file_of, targets)):
        found.update(folders_in(path) if os.path.isdir(path) else [os.path.dirname(path)])
    return found.union(*map(package_folders, found))
