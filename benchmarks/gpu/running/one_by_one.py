"""Runs sections one after the other, each in its process, and ends those that take too long.

Nothing of a section is left when it has ended: neither its process nor those that it started. ``python -m
benchmarks.gpu.running.one_by_one PLACE SITE RESULT`` is such a process. ``SITE`` is JSON; what is found goes
to the file ``RESULT``, stdout and stderr are a log, and the exit status says nothing that the file does not.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks import processes
from benchmarks.command_line import exit_on_sigterm
from benchmarks.gpu.running.section import (
    Effort,
    Findings,
    Found,
    Outcome,
    Section,
    SectionFailed,
    SectionSkipped,
    Site,
)
from benchmarks.processes import Process, is_left

#: For a section that was told to end, to stop its servers.
_GRACE_S: Final = 10.0
#: Less than this and a section is not begun.
_LEAST_S: Final = 5.0
_POLL_S: Final = 0.2
_REASON_LINES: Final = 6
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told: ``say`` gets lines for people, ``watch`` what a section has found so far."""

    say: Callable[[str], None]
    watch: Callable[[Found], None]


def run_sections(
    sections: Sequence[Section],
    site: Site,
    budget_s: float,
    listener: Listener,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Found]:
    """What became of each section, as they end; each has a folder of its own in that of the site.

    ``environment`` is added to that of their processes.
    """
    deadline = time.monotonic() + budget_s
    for section in sections:
        left_s = deadline - time.monotonic()
        if left_s < _LEAST_S:
            found = Found(section, Outcome.FAILED, f"the budget of {budget_s:g} s was spent before it", 0.0)
        else:
            listener.say(f"{section.name}: {section.title}")
            own = replace(site, folder=site.folder / section.name)
            budgeted = replace(section, budget_s=min(section.budget_s, left_s))
            found = _run(budgeted, own, listener, environment or {})
        listener.say(
            f"{section.name}: {found.outcome.value} after {found.took_s:.1f} s {found.reason}".rstrip()
        )
        yield found


def _run(section: Section, site: Site, listener: Listener, environment: Mapping[str, str]) -> Found:
    shutil.rmtree(site.folder, ignore_errors=True)
    site.folder.mkdir(parents=True)
    told = json.dumps(asdict(replace(site, budget_s=section.budget_s)), default=str)
    result, log = site.folder / "found.json", site.folder / "section.log"
    command = [sys.executable, "-m", "benchmarks.gpu.running.one_by_one"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, section.place, told, str(result)],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running = _Running(section, process, result, listener)
        in_time = running.wait()
    if not in_time:
        reason = f"it was ended when its budget of {section.budget_s:.0f} s was spent"
        return running.found(Outcome.FAILED, reason)
    if (ended := running.findings().get("ended")) is not None:
        return running.found(Outcome(ended["outcome"]), ended["reason"])
    status = process.returncode
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return running.found(Outcome.FAILED, f"its process ended with {how}: {_tail(log)}")


@dataclass(slots=True)
class _Running:
    """A section under way, its findings in the file ``result``."""

    section: Section
    process: subprocess.Popen[bytes]
    result: Path
    listener: Listener
    began_at: float = field(default_factory=time.monotonic)
    members: dict[int, Process] = field(default_factory=dict)
    seen_ns: int = 0

    def wait(self) -> bool:
        """Whether it ended in its time. It, and all that it started, has ended in any case."""
        try:
            if self._ends_within(self.section.budget_s):
                return True
            self.process.terminate()
            self._ends_within(_GRACE_S)
            return False
        finally:  # also where this very program is ended
            left = [member for member in self.members.values() if is_left(member)]
            for member in left:
                os.kill(member.pid, signal.SIGKILL)
            deadline = time.monotonic() + _GRACE_S
            while any(map(is_left, left)) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self.process.wait()

    def found(self, outcome: Outcome, reason: str) -> Found:
        took_s = time.monotonic() - self.began_at
        return Found(self.section, outcome, reason, took_s, self.findings())

    def findings(self) -> dict[str, Any]:
        """What is in its file, which is replaced as a whole."""
        findings: dict[str, Any] = json.loads(self.result.read_text()) if self.result.exists() else {}
        return findings

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.members |= {one.pid: one for one in processes.tree(self.process.pid)}
            # The run may be killed at any moment: what is new is told at once.
            written_ns = self.result.stat().st_mtime_ns if self.result.exists() else 0
            if written_ns != self.seen_ns:
                self.seen_ns = written_ns
                self.listener.watch(self.found(Outcome.UNDER_WAY, "the run ended before this section did"))
            try:
                self.process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            return True
        return False


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_REASON_LINES:]) or "its log is empty"


# ---- the process of a section ---------------------------------------------------------------------


def main(place: str, site: str, result: str) -> int:
    exit_on_sigterm()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
    given = json.loads(site)
    given |= {"folder": Path(given["folder"]), "effort": Effort(**given["effort"])}
    findings = Findings(Path(result))
    try:
        module, _, function = place.partition(":")
        getattr(importlib.import_module(module), function)(Site(**given), findings)
        if findings.wrong:
            raise SectionFailed("; ".join(findings.wrong))
    except SectionSkipped as skipped:
        findings.end(Outcome.SKIPPED, str(skipped))
    except Exception as error:  # whatever it is, the other sections go on and the report says it
        traceback.print_exc()
        text = str(error) or "no text"
        is_told = isinstance(error, SectionFailed)
        findings.end(Outcome.FAILED, text if is_told else f"{type(error).__name__}: {text}")
        return 1
    else:
        findings.end(Outcome.DONE)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
