"""The options of the verbs for a running server: which one is meant, and how its answer is written."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from gpuserve.core.errors import ControlError


def _address(server: str | None) -> str | None:
    """Check that it is an address, and return it as it was given."""
    from gpuserve.supervisor.control.operator_client import host_and_port

    if server is not None:
        try:
            host_and_port(server)
        except ControlError as error:
            raise typer.BadParameter(str(error).removeprefix("--server: ")) from None
    return server


Server: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--server",
        callback=_address,
        metavar="ADDRESS",
        help="One of the server's ports, such as localhost:8000. Default: the only server of this user here.",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]
