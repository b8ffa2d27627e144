"""``gpuserve new``: a project to begin with."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gpuserve.projects.making import KINDS, Project

_ABOUT = "; ".join(f"{one.name}: {one.about}" for one in KINDS.values())


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The folder to make; the model is called as it is.")
    ],
    kind: Annotated[str, typer.Option(metavar="KIND", help=f"What is served. {_ABOUT}.")] = "batch",
) -> None:
    """Make a project: a model, its config, a test, a README.

    It is served by `gpuserve dev`, and tested by `pytest`, as it is.

    Examples:
      gpuserve new sentiment
      gpuserve new chat --kind openai
    """
    if kind not in KINDS:
        raise typer.BadParameter(f"expected one of {', '.join(KINDS)}, given {kind!r}", param_hint="--kind")
    project = Project(name, KINDS[kind])
    files = project.make()
    lines = [f"Made {name}: {', '.join(files)}", "Next:", *(f"  {one}" for one in project.next_steps())]
    if extra := KINDS[kind].missing_extra():
        lines.append(f"This kind needs a library that is not installed: pip install 'gpuserve[{extra}]'")
    sys.stdout.write("\n".join(lines) + "\n")
