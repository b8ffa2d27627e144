"""One flag for each key of ``server``, made from the schema: name, description, default, variable.

The values stay text here. They are read and checked as those of environment variables are, so that
``--http-port null`` means the same as ``GPUSERVE_SERVER__HTTP_PORT=null``.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from gpuserve.cli.option_blocks import BlockCommand
from gpuserve.config.messages import Origin
from gpuserve.config.precedence import Override, from_text, variable_name
from gpuserve.config.schema import annotation_at, keys_at
from gpuserve.config.server_entry import ServerEntry

#: The last word of a key says what its value is.
_METAVARS = {"port": "PORT", "s": "SECONDS", "nbytes": "BYTES"}
#: Every option's parameter begins with this, so that none can collide with one of the verb's own.
_PREFIX = "server_"
#: Keys whose flag is not their own name, because the verb has a flag of that name.
_RENAMED = {"name": "--server-name"}


def with_server_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb that ends in ``**flags: str | None`` an option for every key of ``server``."""
    signature = inspect.signature(verb, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [_parameter(path) for path in option_paths()]
    verb.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    verb.__annotations__ = {one.name: one.annotation for one in (*own, *options)}
    return verb


def overrides(flags: Mapping[str, str | None]) -> list[Override]:
    """The flags that were given, as overrides of the file."""
    return [
        from_text(("server", *path), text, flag_name(path), Origin.FLAG)
        for path in option_paths()
        if (text := flags.get(_PREFIX + "_".join(path))) is not None
    ]


def option_paths() -> list[tuple[str, ...]]:
    """The path below ``server`` of every key that has a flag: those of its mappings as well."""
    paths: list[tuple[str, ...]] = []
    for key in ServerEntry.model_fields:
        inner = keys_at(("server", key))
        paths += [(key, one) for one in inner] if inner else [(key,)]
    return paths


def flag_name(path: tuple[str, ...]) -> str:
    """``http_port`` as it is written on the command line; a key of a mapping has both names."""
    name = "_".join(path)
    return _RENAMED.get(name, "--" + name.replace("_", "-"))


def _parameter(path: tuple[str, ...]) -> inspect.Parameter:
    metavar = _METAVARS.get(path[-1].rpartition("_")[2], "TEXT")
    option = typer.Option(
        flag_name(path),
        metavar=metavar,
        help=_help_text(path),
        show_default=False,
        rich_help_panel=BlockCommand.BLOCKS,
    )
    return inspect.Parameter(
        _PREFIX + "_".join(path),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )


def _help_text(path: tuple[str, ...]) -> str:
    """What it is, its choices, its default, and on a line of its own the variable that does the same."""
    field = annotation_at(("server", *path[:-1])).model_fields[path[-1]]
    annotation: Any = annotation_at(("server", *path))
    is_choice = typing.get_origin(annotation) is typing.Literal
    choices = f" One of {', '.join(typing.get_args(annotation))}." if is_choice else ""
    default = field.default if isinstance(field.default, str) and field.default else json.dumps(field.default)
    return f"{field.description}{choices} Default {default}.\n{variable_name(('server', *path))}"
