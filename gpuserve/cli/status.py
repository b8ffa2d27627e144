"""``gpuserve status``: how a running server is."""

from __future__ import annotations

import sys

from gpuserve.cli.operator_call import AsJson, Server, ask, show


def status(server: Server = None, as_json: AsJson = False) -> None:
    """Show how a running server is: its state, its addresses, its models and their workers.

    Answers in every state of the server, also while models load.

    Examples:
      gpuserve status
      gpuserve status --server localhost:8000 --json
    """
    outcome = ask(server, "status", {}, as_json)
    if as_json or outcome.code:
        show(outcome, as_json)
    from gpuserve.cli.status_view import status_text

    sys.stdout.write(status_text(outcome.result))
