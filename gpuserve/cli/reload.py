"""``gpuserve reload``: let a running server read its config, or single models of it, again."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuserve.cli.operator_call import AsJson, Server, ask, ask_each, show


def reload(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL...]", help="Names of models; default all.")
    ] = None,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Apply what has changed in the config of a running server, or load single models anew.

    New workers are loaded beside those that serve, which go on until they are ready:
    no request is lost. Without a name the whole file is read, and only what has changed
    is applied; what cannot change while the server runs is named. With names these
    models are loaded anew, changed or not: their code as well.

    Examples:
      gpuserve reload
      gpuserve reload linear
    """
    if models:
        ask_each(server, "reload", models, as_json)
    else:
        show(ask(server, "reload", {}, as_json), as_json)
