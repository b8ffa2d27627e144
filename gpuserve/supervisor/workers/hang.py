"""A callable that is not back: what is known of it, and what the log says. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Hang(NamedTuple):
    """An instance, in the process ``pid``, has run one call for ``ran_s`` seconds. ``limit_s`` is the model's
    ``execution_timeout_s``, by which it is ended; 0 where there is none, and it is only told of.
    """

    instance: str
    pid: int
    ran_s: float
    limit_s: float


def told_hang(hang: Hang, *, can_be_killed: bool) -> str:
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
