"""``gpuserve status --watch``: the status again whenever something happens, and each second."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from gpuserve.cli.views.status_view import status_text
from gpuserve.cli.views.tables import shortened
from gpuserve.follow.stream import EventStream, chosen_kinds

_PERIOD_S: Final = 1.0
#: What happens faster than this is shown together.
_MIN_PERIOD_S: Final = 0.2
#: To the upper left corner; clear the rest of a line; clear all below.
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_CLEAR_ALL: Final = "\x1b[2J"


def watch_status(server: str | None, status: Callable[[], Mapping[str, Any]], *, as_json: bool) -> None:
    """Write what ``status`` gives, until the server ends: on a terminal one over the other, else one after
    the other, as JSON one a line.
    """
    is_screen = sys.stdout.isatty() and not as_json
    if is_screen:
        sys.stdout.write(_CLEAR_ALL)
    with EventStream(server, chosen_kinds(())) as stream:
        while not stream.is_over:
            document = status()
            if as_json:
                sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
            elif is_screen:
                sys.stdout.write(screen(document, shutil.get_terminal_size()))
            else:
                sys.stdout.write(f"{status_text(document)}\n")
            sys.stdout.flush()
            time.sleep(_MIN_PERIOD_S)
            stream.next(_PERIOD_S - _MIN_PERIOD_S)
            while stream.next(0.0) is not None:  # what has happened meanwhile is shown with it
                pass


def screen(document: Mapping[str, Any], size: os.terminal_size) -> str:
    """Write the status over what is on the screen. What it has no room for is counted."""
    lines = status_text(document, size.columns).splitlines()
    if len(lines) >= size.lines:
        hidden = len(lines) - size.lines + 2
        lines = [*lines[: size.lines - 2], f"{hidden} more lines"]
    shown = "".join(f"{shortened(line, size.columns)}{_CLEAR_LINE}\n" for line in lines)
    return f"{_HOME}{shown}{_CLEAR_BELOW}"
