"""One flag for each key of ``server``, made from the schema; shown by ``--help`` as blocks of lines, as a
table leaves no width for text.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer.core import TyperCommand

from gpuserve.cli.console.options import option, with_options
from gpuserve.cli.console.server_flags import (
    flag_name,
    is_switch,
    negation,
    option_paths,
    parameter_name,
)
from gpuserve.config.entries import Scalar
from gpuserve.config.precedence import variable_name
from gpuserve.config.schema import key_at, kind_at

if TYPE_CHECKING:
    from rich.console import RenderableType

_INDENT = 4
#: The last word of a key says what its value is.
_METAVARS = {"port": "PORT", "s": "TIME", "nbytes": "BYTES"}


class BlockCommand(TyperCommand):
    """A verb whose options of the panel ``BLOCKS`` are shown as blocks, after all others."""

    BLOCKS = "Server (each with its environment variable)"

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help: the others as typer shows them, the blocks, and then the epilog."""
        from rich.console import Console
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.text import Text

        others = copy.copy(self)
        others.params = [one for one in self.params if not _is_block(one)]
        others.epilog = None
        super(BlockCommand, others).format_help(ctx, formatter)
        blocks = [one for one in self.params if _is_block(one)]
        console = Console()
        console.print(Panel(_blocks(blocks), border_style="dim", title=self.BLOCKS, title_align="left"))
        if self.epilog:
            console.print(Padding(Text(self.epilog), 1))


def _is_block(parameter: Any) -> bool:
    return getattr(parameter, "rich_help_panel", None) == BlockCommand.BLOCKS


def _blocks(options: Sequence[Any]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines: list[RenderableType] = []
    for one in options:
        flags = Text(", ".join((*one.opts, *one.secondary_opts)), style="bold cyan")
        lines.append(flags.append(f" {one.metavar}" if one.metavar else "", style="bold yellow"))
        lines.append(Padding(Text(one.help), (0, 0, 0, _INDENT)))
    return Group(*lines)


def with_server_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb that ends in ``**flags: str | bool | None`` an option for every key of ``server``."""
    return with_options(verb, map(_parameter, option_paths()))


def _parameter(path: tuple[str, ...]) -> inspect.Parameter:
    name = flag_name(path)
    metavar: str | None = _METAVARS.get(path[-1].rpartition("_")[2], "TEXT")
    if is_switch(path):
        name, metavar = f"{name}/{negation(path)}", None
    kind: Any = bool if metavar is None else str
    declared = option(BlockCommand.BLOCKS, _help_text(path), name, metavar=metavar, show_default=False)
    return inspect.Parameter(
        parameter_name(path),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, declared],
    )


def _help_text(path: tuple[str, ...]) -> str:
    """Write what a key is, its choices and default, and on a line of its own its environment variable."""
    key, kind = key_at(("server", *path)), kind_at(("server", *path))
    words = kind.option.words if isinstance(kind, Scalar) and kind.is_text else ()
    choices = f" One of {', '.join(words)}." if words else ""
    default = key.default if isinstance(key.default, str) and key.default else json.dumps(key.default)
    return f"{key.description}{choices} Default {default}.\n{variable_name(('server', *path))}"
