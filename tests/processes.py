"""What the tests ask the kernel about processes: children, command lines, and whether they have ended; and
how they wait for what nobody announces.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

_TICK_S = 0.002


def children(pid: int) -> list[int]:
    """The direct children of a process, of all of its threads."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            continue
    return found


def descendants(pid: int) -> list[int]:
    """The children, theirs, and so on."""
    found = children(pid)
    return found + [one for child in found for one in descendants(child)]


def command_line(pid: int) -> str:
    """Its arguments; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def n_files(pid: int) -> int:
    """How many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def finished(
    command: Sequence[str | Path], *, timeout_s: float = 240.0, check: bool = False, **how: Any
) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with what it printed as text."""
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=timeout_s, **how)


def wait_ended(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until the processes have ended; those that have not. A zombie has ended."""
    deadline = time.monotonic() + timeout_s
    return [pid for pid in pids if not _ended(pid, deadline - time.monotonic())]


def _ended(pid: int, timeout_s: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], max(0.0, timeout_s))[0])
    finally:
        os.close(pidfd)


def measured(figure: str) -> None:
    """Show a figure, with ``pytest -s``. Figures are shown and not asserted: machines differ."""
    sys.stdout.write(f"{figure}\n")


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> float:
    """Look again and again until a condition holds that nobody announces. The seconds that it took.

    Raises:
        AssertionError: it did not hold in time.
    """
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s:g} s: {what}"
        threading.Event().wait(_TICK_S)
    return time.monotonic() - started


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Let others of this event loop have their turns until a condition holds that nobody announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(_TICK_S)
