"""The usual command lines of ``gpuserve serve``, parsed without typer, and the flags of the keys of
``server``.

Typer's import takes a fifth of the CPU time of the supervisor's start. It gets any other command line, and
every wrong one. A key that is true or false has two flags without a value. Values of other keys stay text and
are parsed like environment variables (``null`` included).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpuserve.cli.serving import is_target
from gpuserve.config.entries import Scalar
from gpuserve.config.precedence import Override, from_text
from gpuserve.config.problems import Origin
from gpuserve.config.repositories import CallableFlags, is_callable_path
from gpuserve.config.schema import keys_at, kind_at
from gpuserve.config.settings.server import ServerSettings
from gpuserve.model.options import other_names

_LISTS: Final = ("--input", "--output", "--device")
_NUMBERS: Final = ("--max-batch-size", "--instances")
#: The environment variable of a shell that asks for completions, which typer answers.
_COMPLETION: Final = "_GPUSERVE_COMPLETE"


class PlainCommand(NamedTuple):
    """A parsed command line: the target to serve, the flags of its model, and the settings of the server."""

    target: str
    model_flags: CallableFlags
    server: Sequence[Override]


def parse_plain_command(arguments: Sequence[str]) -> PlainCommand | None:
    """Parse the arguments after ``serve``; return None if typer has to parse them."""
    found = _split_arguments(arguments)
    if found is None or _COMPLETION in os.environ:
        return None
    target, given = found
    numbers = [given[flag][-1] for flag in _NUMBERS if flag in given]
    if not all(text.isascii() and text.isdigit() for text in numbers) or not is_target(target):
        return None
    inputs, outputs, devices = (given.get(flag, ()) for flag in _LISTS)
    size, instances = (int(given[flag][-1]) if flag in given else None for flag in _NUMBERS)
    flags = CallableFlags(given.get("--name", [None])[-1], inputs, outputs, size, devices, instances)
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
    return {
        flag: (path, flag == flag_name(path))
        for path in option_paths()
        if is_switch(path)
        for flag in (flag_name(path), negation(path))
    }


def _split_arguments(arguments: Sequence[str]) -> tuple[str, dict[str, list[str]]] | None:
    """Return the target and the values of each flag, or None if typer has to report a mistake."""
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
            given.pop(argument, None)  # the last of several takes effect
            given[argument] = []
            continue
        flag, joined, value = argument.partition("=")
        value = value if joined else next(rest, "-")
        if flag not in known or value.startswith("-"):
            return None
        given.setdefault(flag, []).append(value)
    return (targets[0], given) if len(targets) == 1 else None


#: Flags of keys whose own name is already an option of the command.
_RENAMED = {"name": "--server-name"}


def overrides(flags: Mapping[str, str | bool | None]) -> list[Override]:
    found = []
    for path in option_paths():
        given, whole = flags.get(parameter_name(path)), ("server", *path)
        if isinstance(given, bool):
            name = flag_name(path) if given else negation(path)
            found.append(Override(whole, given, name, Origin.FLAG))
        elif given is not None:
            name = given_name(flag_name(path), *former_flags(path))
            found.append(from_text(whole, given, name, Origin.FLAG))
    return found


def given_name(*names: str) -> str:
    """Return that of an option's names which is on the command line, or the first."""
    words = {one.partition("=")[0] for one in sys.argv[1:]}
    return next((one for one in names if one in words), names[0])


def option_paths() -> list[tuple[str, ...]]:
    """Return the path below ``server`` of every key that has a flag, including keys of mappings."""
    paths: list[tuple[str, ...]] = []
    for key in keys_at(("server",)):
        inner = keys_at(("server", key))
        paths += [(key, one) for one in inner] if inner else [(key,)]
    return paths


def flag_name(path: tuple[str, ...]) -> str:
    """Return a key's flag, such as ``--http-port``; for a key of a mapping, both names are joined."""
    name = "_".join(path)
    return _RENAMED.get(name, "--" + name.replace("_", "-"))


def former_flags(path: tuple[str, ...]) -> list[str]:
    return [flag_name((other,)) for other, name in other_names(ServerSettings).items() if (name,) == path]


def is_switch(path: tuple[str, ...]) -> bool:
    """Return whether a key is true or false, so that its flags take no value."""
    return isinstance(kind := kind_at(("server", *path)), Scalar) and kind.hint is bool


def negation(path: tuple[str, ...]) -> str:
    """Return the flag that sets a switch to false, such as ``--no-admin-api``."""
    return "--no-" + flag_name(path).removeprefix("--")


def parameter_name(path: tuple[str, ...]) -> str:
    """Return the name of a flag's parameter; the prefix keeps it apart from the command's own parameters."""
    return "server_" + "_".join(path)
