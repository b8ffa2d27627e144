"""What the verbs for a running server have in common: which server, how it goes on, how it ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer

from gpuserve.cli.exit_codes import INTERRUPTED, ExitCode

if TYPE_CHECKING:
    from gpuserve.supervisor.operator.outcome import Outcome


def _address(server: str | None) -> str | None:
    """The address as it was given, if it is one.

    Raises:
        BadParameter: it is none: a wrong command line.
    """
    from gpuserve.errors import ControlError
    from gpuserve.supervisor.operator.control_address import host_and_port

    if server is not None:
        try:
            host_and_port(server)
        except ControlError as error:
            raise typer.BadParameter(str(error).removeprefix("--server: ")) from None
    return server


Server: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--server",
        callback=_address,
        metavar="ADDRESS",
        help="One of the server's ports, such as localhost:8000. Default: the only server of this user here.",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]


def ask(server: str | None, verb: str, arguments: Mapping[str, Any], as_json: bool) -> Outcome:
    """What becomes of a verb; lines of progress go to stderr. Where nobody answers the command ends.

    Raises:
        Exit: there is no such server, or it did not answer; or Ctrl-C.
    """
    from gpuserve.errors import ControlError
    from gpuserve.supervisor.operator.control_client import ask as ask_server
    from gpuserve.supervisor.operator.outcome import Outcome

    try:
        return ask_server(server, verb, arguments, _tell)
    except ControlError as error:
        show(Outcome("UNAVAILABLE", str(error)), as_json)
    except KeyboardInterrupt:
        _tell("interrupted: what the server has begun goes on")
        raise typer.Exit(INTERRUPTED) from None


def ask_each(server: str | None, verb: str, models: Iterable[str], as_json: bool) -> NoReturn:
    """Ask for one model after the other, and go on where one fails; ends the command.

    Raises:
        Exit: the exit status.
    """
    outcomes = {}
    for model in models:
        outcomes[model] = ask(server, verb, {"model": model}, as_json)
        if not as_json:
            show_text(outcomes[model])
    if as_json:
        show_json({model: document(one) for model, one in outcomes.items()})
    end(outcomes.values())


def show(outcome: Outcome, as_json: bool) -> NoReturn:
    """Show how a verb ended, which ends the command.

    Raises:
        Exit: the exit status.
    """
    if as_json:
        show_json(document(outcome))
    else:
        show_text(outcome)
    end([outcome])


def document(outcome: Outcome) -> dict[str, Any]:
    """An outcome for programs: its result, and what else there is to be said."""
    if outcome.code:
        return {"error": outcome.text, "code": outcome.code, **outcome.result}
    return {**outcome.result, **({"text": outcome.text} if outcome.text else {})}


def show_text(outcome: Outcome) -> None:
    """The sentence of an outcome: on stderr where it failed."""
    if outcome.text:
        (sys.stderr if outcome.code else sys.stdout).write(f"{outcome.text}\n")


def show_json(document: Mapping[str, Any]) -> None:
    """A JSON object on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def end(outcomes: Iterable[Outcome]) -> NoReturn:
    """End the command, as a failure where one is.

    Raises:
        Exit: the exit status.
    """
    raise typer.Exit(ExitCode.RUNTIME_FAILURE if any(one.code for one in outcomes) else ExitCode.OK)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
