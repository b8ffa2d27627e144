"""Declarations of command line options: durations, integers, a server's address, computed options."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Final, TypeAlias

import typer

from gpuserve.core.errors import ControlError
from gpuserve.model.options import parse_duration

_INTEGER: Final = re.compile("-?[0-9]{1,18}")
#: A line of prose before another one. Indented lines are commands, and stay lines.
_PROSE_LINE: Final = re.compile(r"^(\S.*)\n(?=\S)", re.MULTILINE)


def option(panel: str | None, text: str | None, *names: str, **more: Any) -> Any:
    """Declare an option of a panel of ``--help`` (None: the default panel) with typer's arguments."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def duration(panel: str | None, text: str, name: str) -> Any:
    """Declare an option that takes a duration such as ``500ms``, as seconds."""

    def parse(value: str | float) -> float:
        try:
            return parse_duration(value) if isinstance(value, str) else value  # a default is a number
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return option(panel, text, name, metavar="TIME", parser=parse)


def integer(panel: str | None, text: str, *names: str, least: int | None = None) -> Any:
    """Declare an option that takes an integer of at least ``least``."""
    expected = "an integer" if least is None else f"an integer of at least {least}"

    def parse(value: str | int) -> int:
        if isinstance(value, int):  # a default
            return value
        if _INTEGER.fullmatch(value) is None or (least is not None and int(value) < least):
            raise typer.BadParameter(f"expected {expected}, given {value!r:.80}")
        return int(value)

    return option(panel, text, *names, metavar="INTEGER", parser=parse)


def command_of(app: typer.Typer) -> Any:
    """Return the click command of an app. Its help shows no value for options that take none, and breaks its
    lines where the terminal ends, not where the docstrings do.
    """
    whole = typer.main.get_command(app)
    for command, context in _all_commands(whole, None):
        command.help = _PROSE_LINE.sub(r"\1 ", inspect.cleandoc(command.help or "")).replace("``", "")
        for parameter in command.get_params(context):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
    return whole


def _all_commands(command: Any, parent: typer.Context | None) -> Iterator[tuple[Any, typer.Context]]:
    """Yield a command and its subcommands. ``--help`` takes its names from the context."""
    context = typer.Context(command, parent=parent, **command.context_settings)
    yield command, context
    for child in getattr(command, "commands", {}).values():
        yield from _all_commands(child, context)


def keyword(
    panel: str | None, name: str, kind: Any, default: Any, text: str | None, *names: str, **more: Any
) -> inspect.Parameter:
    """Return a parameter for ``with_options``: an option with an integer, a duration (float) or a text."""
    declare = {int: integer, float: duration}.get((*typing.get_args(kind), kind)[0], option)
    annotation = Annotated[kind, declare(panel, text, *names, **more)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_options(command: Callable[..., None], options: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Replace the ``**flags`` at the end of a command's parameters by these options."""
    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*own, *options]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _checked_address(server: str | None) -> str | None:
    """Return the address unchanged if it can be parsed; raise BadParameter otherwise."""
    from gpuserve.supervisor.control.operator_client import host_and_port

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
        callback=_checked_address,
        metavar="ADDRESS",
        help="A port of the server, such as localhost:8000. Default: the only server of this user.",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]
