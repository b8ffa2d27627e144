"""Sections of a GPU check that are no checks, for the test of what runs them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import Figure, Goal
from benchmarks.gpu.running.section import Findings, SectionSkipped, Site

_DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
time.sleep(600)
"""


def good(_site: Site, findings: Findings) -> None:
    """Finds a figure that reaches its goal."""
    findings.add(Figure("a case", "of something", (1.0, 0.9), Goal(0.5, at_least=True)))


def skipped(_site: Site, _findings: Findings) -> None:
    """Cannot be run."""
    raise SectionSkipped("there is no such library")


def raises(_site: Site, _findings: Findings) -> None:
    """Ends with an exception."""
    raise ValueError("three is not four")


def wrong(_site: Site, findings: Findings) -> None:
    """Finds something wrong, and goes on."""
    findings.check("a sum", right=False, seen="it is five")
    findings.add(Figure("another case", "of something", (2.0,)))


def crashes(_site: Site, findings: Findings) -> None:
    """Finds a figure, then reads where no memory is."""
    findings.add(Figure("before the crash", "of something", (3.0,)))
    ctypes.string_at(0)


def hangs(site: Site, _findings: Findings) -> None:
    """Never ends, and neither does the process that it starts, which ignores SIGTERM."""
    command = [sys.executable, "-c", _DEAF]
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    Path(site.folder, "child.pid").write_text(str(child.pid))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
    signal.pause()
