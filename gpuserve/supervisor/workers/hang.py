"""A callable that is not back: what is known of it, what the log says, and the end of its worker."""

from __future__ import annotations

import logging
from typing import NamedTuple

from gpuserve.config.settings.logs import log_with_text
from gpuserve.supervisor.core.processes import Child

logger = logging.getLogger(__name__)


class Hang(NamedTuple):
    """An instance, in the process ``pid``, has run one call for ``ran_s`` seconds. ``limit_s`` is the model's
    ``execution_timeout_s``, by which it is ended; 0 where there is none, and it is only told of.
    """

    instance: str
    pid: int
    ran_s: float
    limit_s: float


def tell_hang(process: Child, hang: Hang, fields: dict[str, str], stacks: str) -> None:
    """Log what hangs with the stacks of its process; and where it has a limit, kill that."""
    level = logging.ERROR if hang.limit_s else logging.WARNING
    text = _told(hang, can_be_killed=process.can_be_killed)
    log_with_text(logger, level, text, stacks, fields)
    if hang.limit_s:
        process.kill()


def _told(hang: Hang, *, can_be_killed: bool) -> str:
    """Say what hangs and what becomes of it; the stacks come below."""
    since = f"the callable is not back after {hang.ran_s:.1f} s"
    if not hang.limit_s:
        return f"{since}; execution_timeout_s would end it"
    limit = f"execution_timeout_s is {hang.limit_s:g} s"
    if can_be_killed:
        return f"{since}, and {limit}: the worker is killed and replaced"
    return (
        f"{since}, and {limit}: its thread cannot be killed, and gets nothing more; another takes its place "
        "when the callable returns"
    )
