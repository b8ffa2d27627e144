"""The parser of a command line of ``tritonserver``, as its binary parses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from gpuserve.compat.tritonserver.flags import BY_NAME, FlagFate, FlagKind, TritonFlag
from gpuserve.model.options import nearest

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
    for one in _split_arguments(arguments):
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


def _split_arguments(arguments: Sequence[str]) -> Iterator[tuple[TritonFlag, str] | FlagProblem]:
    """Yield each flag with the text of its value, and a problem for any other argument."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            yield FlagProblem(argument, "expected a flag such as --model-repository=DIR")
            continue
        name, joined, text = argument[2:].partition("=")
        flag = _flag_named(name)
        if isinstance(flag, FlagProblem):
            yield flag
            if not joined and rest and not rest[0].startswith("-"):
                rest.pop(0)  # probably the value of the unknown flag
            continue
        value = text if joined else _next_value(flag, rest)
        if value is None:
            yield FlagProblem(spelled(flag.name), f"expected {flag.kind.value} behind it, given nothing")
        elif flag.kind is FlagKind.BARE and joined:
            yield FlagProblem(spelled(flag.name), f"expected no value, given {text!r}")
        else:
            yield flag, value


def _next_value(flag: TritonFlag, rest: list[str]) -> str | None:
    """Return the value of a flag without ``=``, and remove the value from ``rest``."""
    if flag.kind is FlagKind.BARE:
        return ""
    if flag.kind is FlagKind.BOOLEAN and (not rest or rest[0].lower() not in _BOOLEANS):
        return "true"
    return rest.pop(0) if rest else None


def _flag_named(name: str) -> TritonFlag | FlagProblem:
    if name in BY_NAME:
        return BY_NAME[name]
    matches = [one for one in BY_NAME if name and one.startswith(name)]
    if len(matches) == 1:
        return BY_NAME[matches[0]]
    if matches:
        listed = ", ".join(map(spelled, matches))
        return FlagProblem(spelled(name), f"it could be any of {listed}")
    return FlagProblem(spelled(name), f"tritonserver has no such flag{nearest(name, BY_NAME)}")


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
