"""The parser of a command line of ``tritonserver``, as its binary parses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from gpuserve.compat.tritonserver.flags import BY_NAME, FlagFate, FlagKind, TritonFlag
from gpuserve.core.suggestions import nearest

_BOOLEANS: Final = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


class FlagProblem(NamedTuple):
    """A problem with a flag or an argument: the flag with its dashes, and the reason."""

    label: str
    text: str


class CommandLine(NamedTuple):
    """The given flags with their values, as lists for repeated flags, and all problems."""

    given: Sequence[tuple[TritonFlag, Any]]
    problems: Sequence[FlagProblem]


def spelled(name: str) -> str:
    return f"--{name}"


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Parse ``tritonserver``'s arguments. The last value of an unrepeated flag counts."""
    values: dict[str, Any] = {}
    problems: list[FlagProblem] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            problems.append(FlagProblem(argument, "expected a flag such as --model-repository=DIR"))
            continue
        name, joined, text = argument[2:].partition("=")
        meant = [name] if name in BY_NAME else [one for one in BY_NAME if name and one.startswith(name)]
        if len(meant) != 1:
            why = f"it could be any of {', '.join(map(spelled, meant))}"
            why = why if meant else f"tritonserver has no such flag{nearest(name, BY_NAME)}"
            problems.append(FlagProblem(spelled(name), why))
            if not joined and rest and not rest[0].startswith("-"):
                rest.pop(0)  # probably the value of the unknown flag
            continue
        flag = BY_NAME[meant[0]]
        try:
            if joined and flag.kind is FlagKind.BARE:
                raise ValueError(f"expected no value, given {text!r}")
            value = read_value(flag, text if joined else _next_value(flag, rest))
        except ValueError as error:
            problems.append(FlagProblem(spelled(flag.name), str(error)))
            continue
        if flag.repeated:
            values.setdefault(flag.name, []).append(value)
        else:
            values[flag.name] = value
    return CommandLine([(BY_NAME[name], value) for name, value in values.items()], problems)


def read_value(flag: TritonFlag, text: str) -> Any:
    """Return the value of a flag. Raise ValueError with the expected form if the text is invalid."""
    if flag.words:
        word = {one.lower(): one for one in flag.words}.get(text.lower())
        if word is None:
            raise ValueError(f"expected one of {', '.join(flag.words)}, given {text!r}")
        return word
    try:
        return _READERS[flag.kind](text)
    except (ValueError, KeyError):
        raise ValueError(f"expected {flag.kind.value}, given {text!r}") from None


_READERS: Final[dict[FlagKind, Callable[[str], Any]]] = {
    FlagKind.TEXT: str,
    FlagKind.INTEGER: int,
    FlagKind.NUMBER: float,
    FlagKind.BOOLEAN: lambda text: _BOOLEANS[text.lower()],
    FlagKind.LEVEL: lambda text: int(text if text.isdigit() else _BOOLEANS.get(text.lower(), text)),
    FlagKind.BARE: lambda _: True,
}


def _next_value(flag: TritonFlag, rest: list[str]) -> str:
    """Return the value of a flag without ``=``, and remove the value from ``rest``; raise ValueError."""
    if flag.kind is FlagKind.BARE:
        return ""
    if flag.kind is FlagKind.BOOLEAN and (not rest or rest[0].lower() not in _BOOLEANS):
        return "true"
    if not rest:
        raise ValueError(f"expected {flag.kind.value} behind it, given nothing")
    return rest.pop(0)


def help_text() -> str:
    """Return every flag with what becomes of it, for a terminal."""
    lines = ["Usage: gpuserve tritonserver --model-repository=DIR [--FLAG=VALUE]...", ""]
    for flag in BY_NAME.values():
        lines += [f"  {spelled(flag.name)}", f"        {described(flag)}"]
    return "\n".join([*lines, ""])


def described(flag: TritonFlag) -> str:
    if flag.fate is FlagFate.NO_EFFECT:
        return f"makes no difference: {flag.text}"
    if flag.fate is FlagFate.REFUSED:
        return f"refused: {flag.text}"
    return f"{flag.text}; {flag.more}" if flag.more else flag.text
