"""How a verb with long options is helped: each option of one panel is a block of lines, not a table row.

In a table the longest flag takes its width from every help text; on 80 columns nothing would be left of
them. What the options say is made in ``server_options.py``.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

_INDENT = 4


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
    for option in options:
        flags = Text(", ".join(option.opts), style="bold cyan")
        lines.append(flags.append(f" {option.metavar}", style="bold yellow"))
        lines.append(Padding(Text(option.help), (0, 0, 0, _INDENT)))
    return Group(*lines)
