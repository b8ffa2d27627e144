"""The flags of ``gpuserve serve`` for the keys of ``server``, and what is overridden by them. A key that is
true or false has two flags without a value; values of others stay text, read as environment variables are
(``null`` included).
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuserve.config.entries import Scalar
from gpuserve.config.precedence import Override, from_text
from gpuserve.config.problems import Origin
from gpuserve.config.schema import keys_at, kind_at

#: Keys whose flag is not their own name, because the verb has a flag of that name.
_RENAMED = {"name": "--server-name"}


def overrides(flags: Mapping[str, str | bool | None]) -> list[Override]:
    return [
        _override(path, given)
        for path in option_paths()
        if (given := flags.get(parameter_name(path))) is not None
    ]


def _override(path: tuple[str, ...], given: str | bool) -> Override:
    whole = ("server", *path)
    if isinstance(given, bool):
        return Override(whole, given, flag_name(path) if given else negation(path), Origin.FLAG)
    return from_text(whole, given, flag_name(path), Origin.FLAG)


def option_paths() -> list[tuple[str, ...]]:
    """Return the path below ``server`` of every key that has a flag, those in mappings as well."""
    paths: list[tuple[str, ...]] = []
    for key in keys_at(("server",)):
        inner = keys_at(("server", key))
        paths += [(key, one) for one in inner] if inner else [(key,)]
    return paths


def flag_name(path: tuple[str, ...]) -> str:
    """Return a key's flag, such as ``--http-port``; that of a key in a mapping has both names."""
    name = "_".join(path)
    return _RENAMED.get(name, "--" + name.replace("_", "-"))


def is_switch(path: tuple[str, ...]) -> bool:
    """Whether a key is true or false, so that its flags take no value."""
    return isinstance(kind := kind_at(("server", *path)), Scalar) and kind.hint is bool


def negation(path: tuple[str, ...]) -> str:
    """Return the flag that says false for a switch, such as ``--no-admin-api``."""
    return "--no-" + flag_name(path).removeprefix("--")


def parameter_name(path: tuple[str, ...]) -> str:
    """Return the parameter that a key's flag gives the verb; none can collide with one of the verb's own."""
    return "server_" + "_".join(path)
