"""Options of ``serve``, ``dev``, ``check`` and ``config``: the keys of ``server``, and of a callable."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperCommand

from gpuserve.cli.option_types import keyword, with_options
from gpuserve.cli.serve_command_line import flag_name, is_switch, negation, option_paths, parameter_name
from gpuserve.config.entries import Scalar
from gpuserve.config.precedence import variable_name
from gpuserve.config.repositories import CallableFlags, is_callable_path
from gpuserve.config.schema import key_at, kind_at

if TYPE_CHECKING:
    from rich.console import RenderableType


_INDENT = 4
#: Metavars by the last word of a key, which names the unit or kind of its value.
_METAVARS = {"port": "PORT", "s": "TIME", "nbytes": "BYTES"}


class BlockCommand(TyperCommand):
    """A command whose help prints the options of the panel ``BLOCKS`` as blocks: a table is too narrow."""

    BLOCKS = "Server (each with its environment variable)"

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.console import Console
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.text import Text

        others = copy.copy(self)
        others.params = [one for one in self.params if not _is_block(one)]
        others.epilog = None
        super(BlockCommand, others).format_help(ctx, formatter)
        blocks = [one for one in self.params if _is_block(one)]
        panel = Panel(_option_blocks(blocks), border_style="dim", title=self.BLOCKS, title_align="left")
        console = Console()
        console.print(panel)
        if self.epilog:
            console.print(Padding(Text(self.epilog), 1))


def _is_block(parameter: Any) -> bool:
    return getattr(parameter, "rich_help_panel", None) == BlockCommand.BLOCKS


def _option_blocks(options: Sequence[Any]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines: list[RenderableType] = []
    for parameter in options:
        flags = Text(", ".join((*parameter.opts, *parameter.secondary_opts)), style="bold cyan")
        lines.append(flags.append(f" {parameter.metavar}" if parameter.metavar else "", style="bold yellow"))
        lines.append(Padding(Text(parameter.help), (0, 0, 0, _INDENT)))
    return Group(*lines)


def with_server_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a command that ends in ``**flags: str | bool | None`` an option for every key of ``server``."""
    return with_options(verb, map(_server_parameter, option_paths()))


def _server_parameter(path: tuple[str, ...]) -> inspect.Parameter:
    name = flag_name(path)
    metavar: str | None = _METAVARS.get(path[-1].rpartition("_")[2], "TEXT")
    if is_switch(path):
        name, metavar = f"{name}/{negation(path)}", None
    kind: Any = bool if metavar is None else str
    more = {"metavar": metavar, "show_default": False}
    parameter, text = parameter_name(path), _key_help(path)
    return keyword(BlockCommand.BLOCKS, parameter, kind | None, None, text, name, **more)


def _key_help(path: tuple[str, ...]) -> str:
    """Return the description, choices and default of a key, and on a line of its own its variable."""
    key, kind = key_at(("server", *path)), kind_at(("server", *path))
    words = kind.option.words if isinstance(kind, Scalar) and kind.is_text else ()
    choices = f" One of {', '.join(words)}." if words else ""
    default = key.default if isinstance(key.default, str) and key.default else json.dumps(key.default)
    return f"{key.description}{choices} Default {default}.\n{variable_name(('server', *path))}"


_PANEL = "Model, when the target is a callable"
_TENSOR = "NAME:DTYPE:SHAPE"


# fmt: off
_MODEL_OPTIONS: Final = (
    keyword(_PANEL, "name", str | None, None, "Name of the model; default the callable's."),
    keyword(_PANEL, "inputs", list[str] | None, None,
            "An input tensor; repeatable.", "--input", metavar=_TENSOR),
    keyword(_PANEL, "outputs", list[str] | None, None,
            "An output tensor; repeatable.", "--output", metavar=_TENSOR),
    keyword(_PANEL, "max_batch_size", int | None, None, "Largest batch. Default 0: no batching."),
    keyword(_PANEL, "devices", list[str] | None, None,
            "cpu (default), cuda:0, …, cuda:* for every GPU, or a UUID; repeatable.",
            "--device", metavar="DEVICE"),
    keyword(_PANEL, "instances", int | None, None, "Processes on each device. Default 1."),
)
# fmt: on


def with_model_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a command that ends in ``**flags`` the options that describe a callable's model."""
    return with_options(verb, _MODEL_OPTIONS)


def model_flags(flags: dict[str, Any]) -> CallableFlags:
    """Remove the options of ``with_model_options`` from the options of a command, and return them."""
    name, inputs, outputs, size, devices, instances = (flags.pop(one.name) for one in _MODEL_OPTIONS)
    return CallableFlags(name, inputs or (), outputs or (), size, devices or (), instances)


def require_callable(target: str, flags: CallableFlags) -> None:
    """Raise BadParameter if model options are given for a target that describes its models itself."""
    if flags.given() and not is_callable_path(target):
        only = f"{', '.join(flags.given())} can only be used with a callable such as model.py:predict"
        raise typer.BadParameter(f"{only}; the models of {target} are described there", param_hint="TARGET")
