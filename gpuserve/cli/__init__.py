"""The command line. ``main`` is the ``gpuserve`` script; one file holds one verb.

Data goes to stdout, everything else to stderr. A verb imports what it needs when it runs.
"""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit with one of ``ExitCode``."""
    import sys

    if sys.argv[1:2] == ["serve"] and len(sys.argv) > 2 and not {"-h", "--help"} & set(sys.argv):
        sys.exit(_run_with_front())
    from gpuserve.cli.app import run

    sys.exit(run())


def _run_with_front() -> int:
    """Run ``gpuserve serve``; the front starts while the command line and the configuration are read."""
    from gpuserve.supervisor.front_process import EarlyFront

    front = EarlyFront()
    front.start()
    try:
        from gpuserve.cli.app import run

        return run(front=front)
    finally:
        front.close()
