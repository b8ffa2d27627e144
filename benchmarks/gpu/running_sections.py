"""Runs sections one after the other, each in its process, and ends those that take too long.

Nothing of a section is left when it has ended: neither its process nor those that it started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import processes
from benchmarks.gpu.section import Found, Outcome, Section, Site
from benchmarks.gpu.section_process import site_text
from benchmarks.processes import Process

#: For a section that was told to end, to stop its servers.
_GRACE_S: Final = 10.0
#: Less than this and a section is not begun.
_LEAST_S: Final = 5.0
_POLL_S: Final = 0.05
_REASON_LINES: Final = 6


def run_sections(
    sections: Sequence[Section],
    site: Site,
    budget_s: float,
    say: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Found]:
    """What became of each section, as they end. ``environment`` is added to that of their processes."""
    deadline = time.monotonic() + budget_s
    for section in sections:
        left_s = deadline - time.monotonic()
        if left_s < _LEAST_S:
            found = Found(section, Outcome.FAILED, f"the budget of {budget_s:g} s was spent before it", 0.0)
        else:
            say(f"{section.name}: {section.title}")
            found = _run(section, site, min(section.budget_s, left_s), environment or {})
        say(f"{section.name}: {found.outcome.value} after {found.took_s:.1f} s {found.reason}".rstrip())
        yield found


def _run(section: Section, site: Site, budget_s: float, environment: Mapping[str, str]) -> Found:
    site.folder.mkdir(parents=True, exist_ok=True)
    result, log = site.folder / f"{section.name}.found.json", site.folder / f"{section.name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.section_process"]
    began_at = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, section.place, site_text(site), str(result)],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        in_time = _wait(process, budget_s)
    took_s = time.monotonic() - began_at
    findings = json.loads(result.read_text()) if result.exists() else {}
    if not in_time:
        reason = f"it was ended when its budget of {budget_s:.0f} s was spent"
        return Found(section, Outcome.FAILED, reason, took_s, findings)
    return _found(section, process.returncode, took_s, findings, log)


def _found(section: Section, status: int, took_s: float, findings: Mapping[str, Any], log: Path) -> Found:
    ended = findings.get("ended")
    if ended is None:
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return Found(section, Outcome.FAILED, f"its process ended with {how}: {_tail(log)}", took_s, findings)
    return Found(section, Outcome(ended["outcome"]), ended["reason"], took_s, findings)


def _wait(process: subprocess.Popen[bytes], budget_s: float) -> bool:
    """Whether it ended in its time. It, and all that it started, has ended in any case."""
    members: dict[int, Process] = {}
    deadline, told = time.monotonic() + budget_s, False
    try:
        while process.poll() is None:
            members |= {one.pid: one for one in processes.tree(process.pid)}
            if time.monotonic() > deadline:
                if told:
                    break
                process.terminate()
                told, deadline = True, time.monotonic() + _GRACE_S
            time.sleep(_POLL_S)
    finally:  # also where this very program is ended
        _kill([member for member in members.values() if _is_left(member)])
        process.wait()
    return not told


def _kill(members: Sequence[Process]) -> None:
    """End them; returns when they have, or when it takes too long."""
    for member in members:
        os.kill(member.pid, signal.SIGKILL)
    deadline = time.monotonic() + _GRACE_S
    while any(map(_is_left, members)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _is_left(member: Process) -> bool:
    now = Process.read(member.pid)
    return now is not None and now.started_ticks == member.started_ticks


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_REASON_LINES:]) or "its log is empty"
