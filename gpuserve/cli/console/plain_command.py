"""The usual command lines of ``gpuserve serve``, read without typer: that is a fifth of the CPU that the
supervisor takes for its start. Whatever is not quite plain is left to typer, which says what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpuserve.cli.console.server_flags import (
    flag_name,
    is_switch,
    negation,
    option_paths,
    overrides,
    parameter_name,
)
from gpuserve.cli.console.serving import is_target
from gpuserve.config.precedence import Override
from gpuserve.config.repositories import CallableFlags, is_callable_path

_LISTS: Final = ("--input", "--output", "--device")
_NUMBERS: Final = ("--max-batch-size", "--instances")
#: Set by a shell that asks for completions.
_COMPLETION: Final = "_GPUSERVE_COMPLETE"


class PlainCommand(NamedTuple):
    """What is to be served, and what its flags say of the model and of the server."""

    target: str
    model_flags: CallableFlags
    server: Sequence[Override]


def plain_command(arguments: Sequence[str]) -> PlainCommand | None:
    """Read what stands after ``serve``; None: not plain, or not right."""
    found = _taken_apart(arguments)
    if found is None or _COMPLETION in os.environ:
        return None
    target, given = found
    numbers = [given[flag][-1] for flag in _NUMBERS if flag in given]
    if not all(text.isascii() and text.isdigit() for text in numbers) or not is_target(target):
        return None
    flags = _model_flags(given)
    if flags.given() and not is_callable_path(target):
        return None
    switches = _switches()
    named: dict[str, str | bool | None] = {
        parameter_name(path): given[flag_name(path)][-1]
        for path in option_paths()
        if flag_name(path) in given and not is_switch(path)
    }
    named |= {parameter_name(switches[flag][0]): switches[flag][1] for flag in given if flag in switches}
    return PlainCommand(target, flags, overrides(named))


def _switches() -> dict[str, tuple[tuple[str, ...], bool]]:
    """Each flag that takes no value, with its key and what it says of that."""
    return {
        flag: (path, flag == flag_name(path))
        for path in option_paths()
        if is_switch(path)
        for flag in (flag_name(path), negation(path))
    }


def _taken_apart(arguments: Sequence[str]) -> tuple[str, dict[str, list[str]]] | None:
    """The target, and by flag the values that it is given."""
    switches = _switches()
    known = {"--name", *_LISTS, *_NUMBERS, *map(flag_name, option_paths())} - switches.keys()
    targets: list[str] = []
    given: dict[str, list[str]] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            targets.append(argument)
            continue
        if argument in switches:
            given.pop(argument, None)  # the last of several counts
            given[argument] = []
            continue
        flag, joined, value = argument.partition("=")
        value = value if joined else next(rest, "-")
        if flag not in known or value.startswith("-"):
            return None
        given.setdefault(flag, []).append(value)
    return (targets[0], given) if len(targets) == 1 else None


def _model_flags(given: Mapping[str, list[str]]) -> CallableFlags:
    inputs, outputs, devices = (given.get(flag, ()) for flag in _LISTS)
    size, instances = (int(given[flag][-1]) if flag in given else None for flag in _NUMBERS)
    name = given["--name"][-1] if "--name" in given else None
    return CallableFlags(name, inputs, outputs, size, devices, instances)
