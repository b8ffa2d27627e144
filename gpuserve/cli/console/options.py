"""How the verbs declare options: one of a panel of ``--help``, and many that are computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import typer


def option(panel: str | None, text: str | None, *names: str, **more: Any) -> Any:
    """Declare an option of a panel (None: the usual one) with its help text, names and arguments of typer."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def with_options(verb: Callable[..., None], options: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Give a verb that ends in ``**flags`` these options in their place."""
    signature = inspect.signature(verb, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*own, *options]
    verb.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {one.name: one.annotation for one in parameters}
    return verb
