"""The verbs for a running server: ``status``, ``drain``, ``load``, ``unload``, ``reload`` and ``scale``. They
need little and start fast, so they are a command line of their own as well.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeAlias

import typer

from gpuserve.cli.console.exit_codes import INTERRUPTED, ExitCode, help_text
from gpuserve.cli.console.options import command_of, duration
from gpuserve.cli.console.which_server import AsJson, Server
from gpuserve.cli.verbs.events import events
from gpuserve.cli.verbs.logs import logs
from gpuserve.cli.verbs.top import top
from gpuserve.core.errors import ControlError, GpuserveError

if TYPE_CHECKING:
    from gpuserve.supervisor.control.operator_protocol import VerbOutcome

#: One or more; no number of instances has ten digits.
_COUNT: Final = re.compile("[1-9][0-9]{0,8}")


Models: TypeAlias = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names of models.")]


# ---- the verbs ------------------------------------------------------------------------------


def status(
    server: Server = None,
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again each second, until you press Ctrl-C.")
    ] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show where each thread of the front and of every worker stands.")
    ] = False,
) -> None:
    """Show how a running server is: its state, its addresses, its models and their workers.

    Answers in every state of the server, also while models load or callables hang.

    Examples:
      gpuserve status
      gpuserve status --server localhost:8000 --json
      gpuserve status --watch
      gpuserve status --stacks
    """
    if watch and stacks:
        raise typer.BadParameter("cannot be combined with --watch", param_hint="--stacks")
    if watch:
        _watch(server, as_json)
    outcome = _ask(server, "status", {}, as_json)
    if stacks and not outcome.code:
        texts: list[str] = []
        _ask(server, "stacks", {}, as_json, texts.append)
        outcome.result["stacks"] = texts
    if as_json or outcome.code:
        _show(outcome, as_json)
    from gpuserve.cli.views.status_view import status_text

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    sys.stdout.write(status_text(outcome.result, width))
    for text in outcome.result.get("stacks", ()):
        sys.stdout.write(f"\n{text}\n")


def _watch(server: str | None, as_json: bool) -> NoReturn:
    """Show the status again and again; Exit: the server has ended, or Ctrl-C."""
    from gpuserve.cli.console.status_watch import watch_status
    from gpuserve.supervisor.control.operator_client import ask

    try:
        watch_status(server, lambda: ask(server, "status", {}, _tell).result, as_json=as_json)
    except ControlError as error:
        _tell(str(error))
        raise typer.Exit(ExitCode.RUNTIME_FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.OK) from None  # that is how it is meant to end
    _tell("the server has ended")
    raise typer.Exit(ExitCode.OK)


def drain(
    timeout_s: Annotated[
        float | None,
        duration(
            None,
            "How long to wait, after the lame duck, until nothing runs: 60s, 5m. Default drain_timeout_s.",
            "--timeout",
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Put the server back into service.")] = False,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Take a running server out of service: not ready, but requests that still come are served.

    After lame_duck_s its clients are told that their connections take no more requests.
    Returns when no request waits, runs or comes; with exit status 1 where that takes too long.
    The server stays up, not ready, until --undo or its end.

    Examples:
      gpuserve drain --timeout 60
      gpuserve drain --undo
    """
    if undo and timeout_s is not None:
        raise typer.BadParameter("cannot be combined with --undo", param_hint="--timeout")
    arguments = {"undo": True} if undo else {} if timeout_s is None else {"timeout_s": timeout_s}
    _show(_ask(server, "drain", arguments, as_json), as_json)


def load(models: Models, server: Server = None, as_json: AsJson = False) -> None:
    """Load models that a running server knows and does not serve.

    They are read from its config file as it is now. A model that is loaded stays as it is.

    Example:
      gpuserve load linear
    """
    _ask_each(server, "load", models, as_json)


def unload(models: Models, server: Server = None, as_json: AsJson = False) -> None:
    """Unload models of a running server: their requests are finished, then their workers end.

    Example:
      gpuserve unload linear
    """
    _ask_each(server, "unload", models, as_json)


def reload(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL...]", help="Names of models; default all.")
    ] = None,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Apply what has changed in the config of a running server, or load single models anew.

    New workers are loaded beside those that serve, which go on until they are ready:
    no request is lost. Without a name the whole file is read, and only what has changed
    is applied; what cannot change while the server runs is named. With names these
    models are loaded anew, changed or not: their code as well.

    Examples:
      gpuserve reload
      gpuserve reload linear
    """
    if models:
        _ask_each(server, "reload", models, as_json)
    else:
        _show(_ask(server, "reload", {}, as_json), as_json)


def scale(
    counts: Annotated[
        list[str], typer.Argument(metavar="MODEL=N...", help="Instances of a model on each of its devices.")
    ],
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Change how many instances models of a running server have, while they serve.

    The config file is not changed.

    Examples:
      gpuserve scale linear=4
      gpuserve scale linear=4 other=2
    """
    outcome = _ask(server, "scale", {"counts": _counts(counts)}, as_json)
    if not as_json:
        for model, one in outcome.result.get("models", {}).items():
            sys.stdout.write(f"{model}: {one['before']} -> {one.get('after', one['before'])}\n")
    _show(outcome, as_json)


def _counts(texts: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for text in texts:
        model, _, count = text.rpartition("=")
        if not model or not _COUNT.fullmatch(count):
            raise typer.BadParameter(
                f"expected MODEL=N with N of 1 or more, such as linear=4, given {text!r}",
                param_hint="MODEL=N",
            )
        if model in found:
            raise typer.BadParameter(f"model {model!r} is named twice", param_hint="MODEL=N")
        found[model] = int(count)
    return found


# ---- asking, and showing the answer ---------------------------------------------------------


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _ask(
    server: str | None,
    verb: str,
    arguments: Mapping[str, Any],
    as_json: bool,
    tell: Callable[[str], None] = _tell,
) -> VerbOutcome:
    """Ask a server, with progress on stderr, and return its answer; Exit: none came, or Ctrl-C."""
    from gpuserve.supervisor.control.operator_client import ask
    from gpuserve.supervisor.control.operator_protocol import VerbOutcome

    try:
        return ask(server, verb, arguments, tell)
    except ControlError as error:
        _show(VerbOutcome("UNAVAILABLE", str(error)), as_json)
    except KeyboardInterrupt:
        _tell("interrupted: what the server has begun goes on")
        raise typer.Exit(INTERRUPTED) from None


def _ask_each(server: str | None, verb: str, models: Iterable[str], as_json: bool) -> NoReturn:
    """Ask for one model after the other, go on where one fails, and end the command."""
    outcomes = {}
    for model in models:
        outcomes[model] = _ask(server, verb, {"model": model}, as_json)
        if not as_json:
            _show_text(outcomes[model])
    if as_json:
        _show_json({model: _document(one) for model, one in outcomes.items()})
    _end(outcomes.values())


def _show(outcome: VerbOutcome, as_json: bool) -> NoReturn:
    """Show one answer and end the command."""
    if as_json:
        _show_json(_document(outcome))
    else:
        _show_text(outcome)
    _end([outcome])


def _document(outcome: VerbOutcome) -> dict[str, Any]:
    """Return an answer for programs: its result, its text, and its code where it failed."""
    if outcome.code:
        return {"error": outcome.text, "code": outcome.code, **outcome.result}
    return {**outcome.result, **({"text": outcome.text} if outcome.text else {})}


def _show_text(outcome: VerbOutcome) -> None:
    if outcome.text:
        (sys.stderr if outcome.code else sys.stdout).write(f"{outcome.text}\n")


def _show_json(document: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _end(outcomes: Iterable[VerbOutcome]) -> NoReturn:
    raise typer.Exit(ExitCode.RUNTIME_FAILURE if any(one.code for one in outcomes) else ExitCode.OK)


# ---- as a command line ----------------------------------------------------------------------


def add_verbs(app: typer.Typer) -> None:
    for verb in (status, top, events, logs, drain, load, unload, reload, scale):
        app.command(epilog=help_text())(verb)


def run() -> int:
    """Run ``sys.argv``, whose first word is one of the verbs, and return its exit status."""
    app = typer.Typer(
        name="gpuserve",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    add_verbs(app)
    try:
        command_of(app)(prog_name="gpuserve")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.USAGE
    except GpuserveError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.RUNTIME_FAILURE
    except OSError as error:  # of stdout: the disk is full
        sys.stderr.write(f"stdout: {error.strerror}\n")
        return ExitCode.RUNTIME_FAILURE
    return ExitCode.OK
