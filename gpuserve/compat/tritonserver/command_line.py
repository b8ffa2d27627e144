"""A command line of ``tritonserver`` read as its binary reads it: ``--flag=value`` or ``--flag value``, flags
by the beginning of their name where no other begins so. A boolean may stand alone as well. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from gpuserve.compat.tritonserver.flags import BY_NAME, Fate, Flag, Kind
from gpuserve.model.options import nearest

_BOOLEANS: Final = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


class FlagProblem(NamedTuple):
    """What is wrong with a flag, by its name with the dashes, or with an argument that is none."""

    label: str
    text: str


class CommandLine(NamedTuple):
    """The flags that are given with their values, those of repeated ones as lists, and all that is wrong."""

    given: Sequence[tuple[Flag, Any]]
    problems: Sequence[FlagProblem]


def spelled(name: str) -> str:
    """The flag as it is written on a command line."""
    return f"--{name}"


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Read what stands behind ``tritonserver``; of a flag that is not repeated the last value counts."""
    values: dict[str, Any] = {}
    problems: list[FlagProblem] = []
    for one in _taken_apart(arguments):
        if isinstance(one, FlagProblem):
            problems.append(one)
            continue
        flag, text = one
        try:
            value = read_value(flag, text)
        except ValueError as error:
            problems.append(FlagProblem(spelled(flag.name), str(error)))
            continue
        if flag.repeated:
            values.setdefault(flag.name, []).append(value)
        else:
            values[flag.name] = value
    return CommandLine([(BY_NAME[name], value) for name, value in values.items()], problems)


def read_value(flag: Flag, text: str) -> Any:
    """The value of a flag. Raises ValueError: the text is none; it says what was expected."""
    if flag.words:
        word = {one.lower(): one for one in flag.words}.get(text.lower())
        if word is None:
            raise ValueError(f"expected one of {', '.join(flag.words)}, given {text!r}")
        return word
    try:
        return _READERS[flag.kind](text)
    except (ValueError, KeyError):
        raise ValueError(f"expected {flag.kind.value}, given {text!r}") from None


def _boolean(text: str) -> bool:
    return _BOOLEANS[text.lower()]


def _level(text: str) -> int:
    word = _BOOLEANS.get(text.lower())
    return int(text) if word is None or text.isdigit() else int(word)


_READERS: Final[dict[Kind, Callable[[str], Any]]] = {
    Kind.TEXT: str,
    Kind.INTEGER: int,
    Kind.NUMBER: float,
    Kind.BOOLEAN: _boolean,
    Kind.LEVEL: _level,
    Kind.BARE: lambda _: True,
}


def _taken_apart(arguments: Sequence[str]) -> Iterator[tuple[Flag, str] | FlagProblem]:
    """Each flag with the text of its value, and what is no flag."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            yield FlagProblem(argument, "expected a flag such as --model-repository=DIR")
            continue
        name, joined, text = argument[2:].partition("=")
        flag = _named(name)
        if isinstance(flag, FlagProblem):
            yield flag
            if not joined and rest and not rest[0].startswith("-"):
                rest.pop(0)  # its value, most likely
            continue
        value = text if joined else _following(flag, rest)
        if value is None:
            yield FlagProblem(spelled(flag.name), f"expected {flag.kind.value} behind it, given nothing")
        elif flag.kind is Kind.BARE and joined:
            yield FlagProblem(spelled(flag.name), f"expected no value, given {text!r}")
        else:
            yield flag, value


def _following(flag: Flag, rest: list[str]) -> str | None:
    """The value of a flag that has none joined to it; what it takes of the rest is taken out."""
    if flag.kind is Kind.BARE:
        return ""
    if flag.kind is Kind.BOOLEAN and (not rest or rest[0].lower() not in _BOOLEANS):
        return "true"
    return rest.pop(0) if rest else None


def _named(name: str) -> Flag | FlagProblem:
    if name in BY_NAME:
        return BY_NAME[name]
    begun = [one for one in BY_NAME if name and one.startswith(name)]
    if len(begun) == 1:
        return BY_NAME[begun[0]]
    if begun:
        listed = ", ".join(map(spelled, begun))
        return FlagProblem(spelled(name), f"it could be any of {listed}")
    return FlagProblem(spelled(name), f"tritonserver has no such flag{nearest(name, BY_NAME)}")


def help_text() -> str:
    """Every flag with what becomes of it, for a terminal."""
    lines = ["Usage: gpuserve tritonserver --model-repository=DIR [--FLAG=VALUE]...", ""]
    for flag in BY_NAME.values():
        lines += [f"  {spelled(flag.name)}", f"        {described(flag)}"]
    return "\n".join([*lines, ""])


def described(flag: Flag) -> str:
    """What becomes of a flag, as a line."""
    if flag.fate is Fate.NO_EFFECT:
        return f"makes no difference: {flag.text}"
    if flag.fate is Fate.REFUSED:
        return f"refused: {flag.text}"
    return f"{flag.text}; {flag.more}" if flag.more else flag.text
