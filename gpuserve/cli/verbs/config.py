"""``gpuserve config``: the values that hold in the end, and where each comes from."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from gpuserve.cli.console import server_options
from gpuserve.cli.console.server_flags import overrides


@server_options.with_server_options
def config(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A config file, a model file, a callable or a repository.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Leave out what is a default.")] = False,
    **flags: str | bool | None,
) -> None:
    """Print the configuration that serve would have, with the origin of each value.

    A flag goes before its variable, that before the file, that before what a callable says of itself, that
    before the default. Tokens are masked; with --brief the rest is a config file that says the same.

    Examples:
      gpuserve config config.yaml
      gpuserve config config.yaml --brief --http-port 9000
      gpuserve config models/ --json
    """
    from gpuserve.cli.views.config_view import as_text
    from gpuserve.config.effective import effective
    from gpuserve.config.triton.load import load_target

    configuration = load_target(target, os.environ, overrides(flags))
    values = [one for one in effective(configuration) if one.origin is not None or not brief]
    if as_json:
        document = {"target": target, "values": [one.as_json() for one in values]}
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(as_text(values))
