"""The stacks of a process as ``faulthandler`` writes them, and what is said of them: which thread is the main
one, where the code of the user's stands, and how a process is that shows nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import gpuserve_worker
from gpuserve.control.process_state import how_it_is

_HEAD: Final = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(.*) \(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
#: Nothing of the user's: packages, the standard library, what is compiled into Python.
_NOT_USERS: Final = re.compile(r"/site-packages/|/dist-packages/|/lib(64)?/python3|^<(frozen|string)")
_HERE: Final = Path(gpuserve_worker.__file__).parent.parent
_OURS: Final = (f"{_HERE}/gpuserve/", f"{_HERE}/gpuserve_worker/")
#: Threads of each worker that only wait: for messages of the supervisor, and for the signal of ``stacks.py``.
_WAITING_THREADS: Final = ("/gpuserve_worker/running/supervision.py", "/gpuserve_worker/protocol/stacks.py")
#: The frame at the foot of the main thread of a program.
_FOOT: Final = ("<frozen runpy>", "/runpy.py")


def why_silent(pid: int) -> str:
    """Say of a process that shows no stacks how it is."""
    return f"(no stacks of process {pid}: {how_it_is(pid)})"


def told(text: str) -> str:
    """Return the same stacks with the main thread first and without the worker's threads that only wait."""
    threads = [
        lines
        for lines in _threads(text)
        if not any(file in line for file in _WAITING_THREADS for line in lines)
    ]
    threads.sort(key=lambda one: not _is_main(one))
    lines = [line for one in threads for line in (_shown_head(one), *one[1:])]
    return "\n".join(lines) or text.strip()


def place_of_user(text: str) -> str:
    """Where the innermost frame of the user's own code in the main thread is, or of any thread: "FILE:LINE in
    NAME"; "" where none is.
    """
    for thread in sorted(_threads(text), key=lambda one: not _is_main(one)):
        for line in thread[1:]:
            frame = _FRAME.fullmatch(line)
            if frame and not (_NOT_USERS.search(frame["file"]) or frame["file"].startswith(_OURS)):
                return f"{frame['file']}:{frame['line']} in {frame['name']}"
    return ""


def _threads(text: str) -> Iterator[list[str]]:
    """The lines of each thread, its head the first of them."""
    thread: list[str] = []
    for line in text.splitlines():
        if _HEAD.fullmatch(line.strip()) or line.startswith("Main thread"):
            if thread:
                yield thread
            thread = [line]
        elif thread and line.strip():
            thread.append(line)
    if thread:
        yield thread


def _is_main(thread: list[str]) -> bool:
    return thread[0].startswith("Main thread") or any(foot in thread[-1] for foot in _FOOT)


def _shown_head(thread: list[str]) -> str:
    # "Current" is the thread that the signal came to, which says nothing of what the process does.
    head = thread[0].replace("Current thread", "Thread")
    return head.replace("Thread", "Main thread", 1) if _is_main(thread) else head
