"""The reference of the command line: what ``--help`` says of each verb, as Markdown."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import typer

from gpuserve.cli.app import build_app
from gpuserve.cli.exit_codes import MEANINGS
from gpuserve.compat.tritonserver.command_line import help_text as help_of_tritonserver


def page() -> str:
    """Give every verb with its arguments and options, and the exit status."""
    command = typer.main.get_command(build_app())
    verbs = "\n".join(line for name, verb in _verbs("gpuserve", command) for line in _section(name, verb))
    codes = "\n".join(f"| {code.value} | {text} |" for code, text in MEANINGS.items())
    return f"{verbs}\n## Exit status\n\n| exit status | |\n|---|---|\n{codes}\n"


def _verbs(prefix: str, command: Any) -> Iterator[tuple[str, Any]]:
    for name, verb in command.commands.items():
        if getattr(verb, "commands", None):
            yield from _verbs(f"{prefix} {name}", verb)
        elif not verb.hidden:
            yield f"{prefix} {name}", verb


def _section(name: str, verb: Any) -> Iterator[str]:
    context = verb.context_class(verb, info_name=name)
    yield f"\n## {name}\n"
    yield f"```text\n{name} {' '.join(verb.collect_usage_pieces(context))}\n```\n"
    yield from _description(verb.help or "")
    if name == "gpuserve tritonserver":
        yield f"```text\n{help_of_tritonserver().strip()}\n```\n"
        return
    shown = [one for one in verb.params if not getattr(one, "hidden", False)]
    for panel, options in itertools.groupby(shown, lambda one: getattr(one, "rich_help_panel", None)):
        yield from ([f"{_plain(panel)}:\n"] if panel else ())
        yield from ("| | |", "|---|---|", *map(_row, options), "")


def _description(text: str) -> Iterator[str]:
    """Give the docstring of a verb; lines that stand further in are commands."""
    for paragraph in re.split(r"\n\s*\n", text.replace("\b", "").strip()):
        lines = paragraph.splitlines()
        yield _plain(" ".join(line for line in lines if not line.startswith("  "))) + "\n"
        if commands := [line.strip() for line in lines if line.startswith("  ")]:
            yield "```text\n" + "\n".join(commands) + "\n```\n"


def _row(parameter: Any) -> str:
    """Give what one argument or option is; the help of some ends with a line of its variable's name."""
    text, _, variable = (parameter.help or "").partition("\n")
    said = f" `{variable}`" if variable else ""
    return f"| `{_names(parameter)}` | {_plain(text)}{said} |"


def _names(parameter: Any) -> str:
    if not hasattr(parameter, "is_flag"):  # an argument
        return str(parameter.metavar or parameter.name.upper()).replace("|", "\\|")
    names = ", ".join((*parameter.opts, *parameter.secondary_opts))
    if parameter.is_flag or parameter.count:
        return names
    kind = getattr(parameter.type_descriptor, "annotation", str)
    metavar = parameter.metavar or getattr(kind, "__name__", "value").upper().replace("STR", "TEXT")
    return f"{names} {metavar}".replace("|", "\\|")


def _plain(text: str) -> str:
    """Give a text of the command line as Markdown that shows it letter by letter, in one cell."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))
