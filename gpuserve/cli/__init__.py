"""The command line. ``main`` is the ``gpuserve`` script; one file holds one verb.

Data goes to stdout, everything else to stderr. A verb imports what it needs when it runs.
"""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit with one of ``ExitCode``."""
    import sys

    from gpuserve.cli.app import run

    sys.exit(run())
