"""The limit of event-loop turns in the tests, and the report of turns over it.

``GPUSERVE_TURN_LIMIT_MS`` is the limit in CPU time. Nothing is measured unless it is set. Reports go to the
log and, as lines of JSON, to the file ``GPUSERVE_TURN_FILE`` if that is set.
"""

from __future__ import annotations

import json
import logging
import os
import sys

logger = logging.getLogger(__name__)


def turn_limit_s() -> float | None:
    """Return the limit in seconds, None if there is none."""
    limit_ms = os.environ.get("GPUSERVE_TURN_LIMIT_MS")
    return float(limit_ms) / 1e3 if limit_ms else None


def report_turn(took_s: float, limit_s: float, where: str) -> None:
    """Report a turn that took ``took_s`` of CPU time."""
    text = "event loop turn took %.0f ms of CPU, expected at most %g ms:\n%s"
    logger.warning(text, took_s * 1e3, limit_s * 1e3, where)
    if path := os.environ.get("GPUSERVE_TURN_FILE"):
        line = json.dumps({"process": sys.orig_argv[-3:], "took_s": took_s, "where": where})
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, f"{line}\n".encode())
        os.close(fd)
