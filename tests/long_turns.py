"""Turns of event loops that took too long, in the servers that tests start. They write each into a file."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

#: CPU time of the loop's own thread. Four times what a body may take, since caches and clocks of machines
#: differ, and a virtual machine counts the time that its host takes away.
LIMIT_MS: Final = 100
PAGES_LIMIT_S: Final = 0.2
_PATH: Final = Path(tempfile.gettempdir()) / f"gpuserve-turns-{os.getpid()}"
_read = 0


def tell_servers() -> None:
    """Have the servers that are started from now on measure their turns."""
    os.environ.setdefault("GPUSERVE_TURN_LIMIT_MS", str(LIMIT_MS))
    os.environ["GPUSERVE_TURN_FILE"] = str(_PATH)
    atexit.register(_PATH.unlink, missing_ok=True)


def since_last() -> list[str]:
    """Return a text for each turn over the limit since the last call."""
    global _read
    with contextlib.suppress(FileNotFoundError):
        lines = _PATH.read_text(encoding="utf-8").splitlines()
        new, _read = lines[_read:], len(lines)
        return [_shown(turn) for turn in map(json.loads, new) if not _waited_for_pages(turn)]
    return []


def _waited_for_pages(turn: dict[str, Any]) -> bool:
    """Return whether the kernel was clearing pages, for which some virtual machines take 20 µs each."""
    return "in touch\n" in turn["where"] and turn["took_s"] < PAGES_LIMIT_S


def _shown(turn: dict[str, Any]) -> str:
    return f"{turn['took_s'] * 1e3:.0f} ms of CPU in {turn['process']}, at\n{turn['where']}"
