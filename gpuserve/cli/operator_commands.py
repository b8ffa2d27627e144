"""Commands for a running server, also as an app of their own, because few imports let them start fast."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeAlias

import typer

from gpuserve.cli.exit_codes import INTERRUPTED, ExitCode, help_text, until_interrupted
from gpuserve.cli.live.status_view import event_line, status_screen, status_text
from gpuserve.cli.option_types import AsJson, Server, command_of, duration
from gpuserve.core.errors import ControlError, GpuserveError, InvalidArgument

if TYPE_CHECKING:
    from gpuserve.supervisor.control.operator_protocol import VerbOutcome

#: At least 1 and at most nine digits, more than any number of instances needs.
_COUNT_FORM: Final = re.compile("[1-9][0-9]{0,8}")


Models: TypeAlias = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names of models.")]


def status(
    server: Server = None,
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Update the output each second, until you press Ctrl-C.")
    ] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show the stack of each thread of the front and of every worker.")
    ] = False,
) -> None:
    """Show the state of a running server: its addresses, its models and their workers.

    The server answers in every state, also while models load or callables hang.

    Examples:
      gpuserve status
      gpuserve status --server localhost:8000 --json
      gpuserve status --watch
      gpuserve status --stacks
    """
    if watch and stacks:
        raise typer.BadParameter("cannot be combined with --watch", param_hint="--stacks")
    if watch:
        from gpuserve.supervisor.control.operator_client import ask

        with until_interrupted():
            watch_status(server, lambda: ask(server, "status", {}, _write_stderr).result, as_json=as_json)
        _write_stderr("the server has ended")
        raise typer.Exit(ExitCode.OK)
    outcome = _ask(server, "status", {}, as_json)
    if stacks and not outcome.code:
        texts: list[str] = []
        _ask(server, "stacks", {}, as_json, texts.append)
        outcome.result["stacks"] = texts
    if as_json or outcome.code:
        _show(outcome, as_json)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    sys.stdout.write(status_text(outcome.result, width))
    for text in outcome.result.get("stacks", ()):
        sys.stdout.write(f"\n{text}\n")


def top(
    sort: Annotated[
        str, typer.Option("--sort", metavar="COLUMN", help="The column to sort by, such as p99 or queue.")
    ] = "req/s",
    containing: Annotated[
        str, typer.Option("--filter", metavar="TEXT", help="Only models whose name contains this text.")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print the table once, and end.")] = False,
    server: Server = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object each second, with --once a single one.")
    ] = False,
) -> None:
    """Show the load of a running server: models, rates and latencies, GPUs, events.

    The screen updates once a second. Keys choose a model, sort, filter, scale, reload and
    drain; h lists them. Every change has to be confirmed with y.

    Examples:
      gpuserve top
      gpuserve top --sort p99 --server localhost:8000
      gpuserve top --once
      gpuserve top --json | jq .server.requests_per_s
    """
    from gpuserve.cli.live.top_columns import SORTS

    if sort.lower() not in SORTS:
        raise typer.BadParameter(f"expected one of {', '.join(SORTS)}, given {sort!r}", param_hint="--sort")
    from gpuserve.cli.live.top_session import print_models, print_samples, run_top

    with until_interrupted():
        if as_json:
            print_samples(server, once=once)
        elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            print_models(server, sort.lower(), containing)
        else:
            run_top(server, sort.lower(), containing)


def drain(
    timeout_s: Annotated[
        float | None,
        duration(
            None, "Time limit after the lame duck period: 60s, 5m. Default drain_timeout_s.", "--timeout"
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Put the server back into service.")] = False,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Take a running server out of service: it is not ready, and still serves requests that arrive.

    After lame_duck_s clients are asked to send requests over other connections. The command
    returns when no request waits, runs or arrives, or with exit status 1 after the timeout.
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
    """Load models of a running server's configuration that are not loaded.

    The server reads its config file again. A model that is loaded stays unchanged.

    Example:
      gpuserve load linear
    """
    _ask_each(server, "load", models, as_json)


def unload(models: Models, server: Server = None, as_json: AsJson = False) -> None:
    """Unload models of a running server: their requests finish, then their workers end.

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
    """Apply changes of a running server's config, or reload single models.

    New workers load beside the old ones, which serve until the new ones are ready, so no
    request is lost. Without a name the server reads the whole file and applies the changes;
    it names changes that need a restart. With names the server reloads these models and
    their code, changed or not.

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
    """Change the number of instances of models while they serve.

    The config file stays unchanged.

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
        if not model or not _COUNT_FORM.fullmatch(count):
            expected = "expected MODEL=N with N of 1 or more, such as linear=4"
            raise typer.BadParameter(f"{expected}, given {text!r}", param_hint="MODEL=N")
        if model in found:
            raise typer.BadParameter(f"model {model!r} is named twice", param_hint="MODEL=N")
        found[model] = int(count)
    return found


def _write_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _ask(
    server: str | None,
    command: str,
    arguments: Mapping[str, Any],
    as_json: bool,
    report: Callable[[str], None] = _write_stderr,
) -> VerbOutcome:
    """Send a command to a server, show its progress on stderr, and return its answer, or raise Exit."""
    from gpuserve.supervisor.control.operator_client import ask
    from gpuserve.supervisor.control.operator_protocol import VerbOutcome

    try:
        return ask(server, command, arguments, report)
    except ControlError as error:
        _show(VerbOutcome("UNAVAILABLE", str(error)), as_json)
    except KeyboardInterrupt:
        _write_stderr("interrupted: the server continues the command")
        raise typer.Exit(INTERRUPTED) from None


def _ask_each(server: str | None, command: str, models: Iterable[str], as_json: bool) -> NoReturn:
    """Send the command for one model after the other, also after a failure, and end the command."""
    outcomes = {}
    for model in models:
        outcomes[model] = _ask(server, command, {"model": model}, as_json)
        if not as_json:
            _show_text(outcomes[model])
    if as_json:
        _show_json({model: _document(one) for model, one in outcomes.items()})
    _exit(outcomes.values())


def _show(outcome: VerbOutcome, as_json: bool) -> NoReturn:
    if as_json:
        _show_json(_document(outcome))
    else:
        _show_text(outcome)
    _exit([outcome])


def _document(outcome: VerbOutcome) -> dict[str, Any]:
    """Return an answer as JSON object: its result, its text, and its code if it failed."""
    if outcome.code:
        return {"error": outcome.text, "code": outcome.code, **outcome.result}
    return {**outcome.result, **({"text": outcome.text} if outcome.text else {})}


def _show_text(outcome: VerbOutcome) -> None:
    if outcome.text:
        (sys.stderr if outcome.code else sys.stdout).write(f"{outcome.text}\n")


def _show_json(document: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _exit(outcomes: Iterable[VerbOutcome]) -> NoReturn:
    raise typer.Exit(ExitCode.RUNTIME_FAILURE if any(one.code for one in outcomes) else ExitCode.OK)


def add_commands(app: typer.Typer) -> None:
    for command in (status, top, events, logs, drain, load, unload, reload, scale):
        app.command(epilog=help_text())(command)


def run() -> int:
    """Run ``sys.argv``, whose first word is one of these commands, and return its exit status."""
    help_names = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(name="gpuserve", context_settings=help_names, pretty_exceptions_enable=False)
    add_commands(app)
    try:
        command_of(app)(prog_name="gpuserve")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.USAGE
    except GpuserveError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.RUNTIME_FAILURE
    except OSError as error:  # of stdout, such as a full disk
        sys.stderr.write(f"stdout: {error.strerror}\n")
        return ExitCode.RUNTIME_FAILURE
    return ExitCode.OK


_PERIOD_S: Final = 1.0
#: Events within this interval are shown together.
_MIN_PERIOD_S: Final = 0.2
_CLEAR_ALL: Final = "\x1b[2J"


def watch_status(server: str | None, status: Callable[[], Mapping[str, Any]], *, as_json: bool) -> None:
    """Write the result of ``status`` each second and after each event, until the server ends.

    A terminal shows the newest status only; other outputs get one after the other, as JSON one a line.
    """
    from gpuserve.cli.live.event_client import EventStream, chosen_kinds

    is_screen = sys.stdout.isatty() and not as_json
    if is_screen:
        sys.stdout.write(_CLEAR_ALL)
    with EventStream(server, chosen_kinds(())) as stream:
        while not stream.is_over:
            document = status()
            if as_json:
                sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
            elif is_screen:
                sys.stdout.write(status_screen(document, shutil.get_terminal_size()))
            else:
                sys.stdout.write(f"{status_text(document)}\n")
            sys.stdout.flush()
            time.sleep(_MIN_PERIOD_S)
            stream.next(_PERIOD_S - _MIN_PERIOD_S)
            while stream.next(0.0) is not None:  # skip events that the next status shows anyway
                pass


def events(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KIND...]", help="Kinds of events; default all but log and sample."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only events of this model.")] = None,
    past: Annotated[
        bool, typer.Option("--past", help="Start with the events that the server has kept, 500 at most.")
    ] = False,
    server: Server = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Show events of a running server, until it ends or you press Ctrl-C.

    Events are: changes of state of the server and of each instance, deaths with their
    reason, loads, reloads, scaling, drains, lost GPUs, bursts of rejections, slow batches.
    The kind sample has the load of the server once a second; the kind log has each line
    of its log.

    Examples:
      gpuserve events
      gpuserve events --past instance_died
      gpuserve events --json sample --server localhost:8000
    """
    from gpuserve.cli.live.event_client import EventStream, chosen_kinds

    try:
        chosen = chosen_kinds(kinds or ())
    except InvalidArgument as error:
        raise typer.BadParameter(str(error), param_hint="KIND") from None
    with until_interrupted(), EventStream(server, chosen, model=model, past=past) as stream:
        for event in stream:
            _write_line(event, event_line(event), as_json)
    sys.stderr.write("the server has ended\n")


def logs(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Only log lines and prints of this model's workers."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with each new line.")] = False,
    server: Server = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Show the last lines of a running server's log, wherever the server writes it.

    A server keeps 1000 lines at most. In a program with Server, prints of workers go to
    the program's own output, and only their log lines are shown here.

    Examples:
      gpuserve logs
      gpuserve logs -f linear
    """
    with until_interrupted():
        if follow:
            _follow_log(server, model, as_json)
        else:
            for line in _kept_lines(server, model):
                _write_line(line, line["line"], as_json)


def _follow_log(server: str | None, model: str | None, as_json: bool) -> None:
    """Write the kept lines and then each new one, every line once."""
    from gpuserve.cli.live.event_client import EventStream
    from gpuserve.core.event_log import EventKind

    last = 0
    with EventStream(server, [EventKind.LOG], model=model) as stream:
        for line in _kept_lines(server, model):
            last = line["number"]
            _write_line(line, line["line"], as_json)
        for line in stream:
            if line["number"] > last:
                _write_line(line, line["line"], as_json)
    sys.stderr.write("the server has ended\n")


def _kept_lines(server: str | None, model: str | None) -> list[dict[str, Any]]:
    from gpuserve.supervisor.control.operator_client import ask

    outcome = ask(server, "logs", {"model": model}, lambda _: None)
    if outcome.code:
        raise ControlError(outcome.text)
    return list(outcome.result["lines"])


def _write_line(document: Mapping[str, Any], text: str, as_json: bool) -> None:
    sys.stdout.write(f"{json.dumps(document, ensure_ascii=False) if as_json else text}\n")
    sys.stdout.flush()
