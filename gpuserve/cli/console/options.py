"""How the verbs declare options: one of a panel of ``--help``, times, and many that are computed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import typer

from gpuserve.model.options import DURATION_PATTERN, MICROSECONDS, parse_duration

_INTEGER: Final = re.compile("-?[0-9]{1,18}")


def option(panel: str | None, text: str | None, *names: str, **more: Any) -> Any:
    """Declare an option of a panel (None: the usual one) with its help text, names and arguments of typer."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def duration(panel: str | None, text: str, name: str) -> Any:
    """Declare an option of a panel that is a length of time."""
    return option(panel, text, name, metavar="TIME", parser=_seconds)


def integer(panel: str | None, text: str, *names: str, least: int | None = None) -> Any:
    """Declare an option of a panel that is an integer, of at least so much."""
    wanted = "an integer" if least is None else f"an integer of at least {least}"

    def read(value: str | int) -> int:
        if isinstance(value, int):  # a default
            return value
        if _INTEGER.fullmatch(value) is None or (least is not None and int(value) < least):
            raise typer.BadParameter(f"expected {wanted}, given {value!r:.80}")
        return int(value)

    return option(panel, text, *names, metavar="INTEGER", parser=read)


def _seconds(value: str | float) -> float:
    """Read what is given for a length of time, or its default."""
    try:
        return parse_duration(value) if isinstance(value, str) else value
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def command_of(app: typer.Typer) -> Any:
    """The command line of an app; its help shows no value for options that take none."""
    whole = typer.main.get_command(app)
    for command in _commands(whole):
        for parameter in command.params:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
    return whole


def _commands(command: Any) -> Iterator[Any]:
    yield command
    for verb in getattr(command, "commands", {}).values():
        yield from _commands(verb)


def with_options(verb: Callable[..., None], options: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Give a verb that ends in ``**flags`` these options in their place."""
    signature = inspect.signature(verb, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*own, *options]
    verb.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {one.name: one.annotation for one in parameters}
    return verb
