"""The last lines of a server's log, as they were logged, and who wants to see the next. Lines come from the
output of workers and front, and from the loggers of this process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from gpuserve.config.settings import logs
from gpuserve.control.reactor import Reactor

#: What is kept.
KEPT_LINES: Final = 1000
KEPT_NBYTES: Final = 512 << 10


class LogLine(NamedTuple):
    """One line, or one record with its traceback. ``number`` counts them; of a worker it has its model."""

    number: int
    time_s: float
    model: str
    instance: str
    level: str
    text: str

    def document(self) -> dict[str, Any]:
        known = {"model": self.model, "instance": self.instance, "level": self.level}
        named = {name: value for name, value in known.items() if value}
        return {
            "time": round(self.time_s, 3), "number": self.number, "kind": "log", **named, "line": self.text,
        }  # fmt: skip


class LogLines:
    """The lines of one server, added from ``open()`` to ``close()``; ``follower`` is given each."""

    def __init__(self, reactor: Reactor, clock: Callable[[], float] = time.time) -> None:
        self.follower: Callable[[LogLine], None] = lambda _: None
        self._clock = clock
        self._lines: deque[LogLine] = deque()
        self._nbytes = 0
        self._number = 0
        self._tap = _Tap(reactor, self)

    def of(self, model: str = "") -> list[LogLine]:
        return [one for one in self._lines if not model or one.model == model]

    def add(self, text: str, fields: Mapping[str, str], level: str = "") -> None:
        """Add a line, in the reactor's thread."""
        self._number += 1
        about = fields.get("model", ""), fields.get("instance", "")
        line = LogLine(self._number, self._clock(), *about, level, text)
        self._lines.append(line)
        self._nbytes += len(text)
        while len(self._lines) > KEPT_LINES or (self._nbytes > KEPT_NBYTES and len(self._lines) > 1):
            self._nbytes -= len(self._lines.popleft().text)
        self.follower(line)

    def open(self) -> None:
        """Take what this process logs as well, in any of its threads."""
        self._tap.thread = threading.get_ident()
        logging.getLogger(logs.ROOT).addHandler(self._tap)

    def close(self) -> None:
        logging.getLogger(logs.ROOT).removeHandler(self._tap)


class _Tap(logging.Handler):
    """Hands records to the reactor's thread, where they become lines."""

    def __init__(self, reactor: Reactor, lines: LogLines) -> None:
        super().__init__()
        self.thread = 0
        self._reactor = reactor
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._show_unhandled(record)
        try:
            text = logs.formatted(record)
        except Exception:
            self.handleError(record)
            return
        fields = {name: getattr(record, name, "") for name in logs.FIELDS}
        if text is None:
            return
        add = partial(self._lines.add, text, fields, record.levelname.lower())
        if threading.get_ident() == self.thread:
            add()
        else:
            self._reactor.call_soon_threadsafe(add)

    def _show_unhandled(self, record: logging.LogRecord) -> None:
        """Show a warning of a program that has not configured any log, as Python does where there is no
        handler. This one, which shows nothing, is not to change that.
        """
        logger: logging.Logger | None = logging.getLogger(record.name)
        taps: list[logging.Handler] = []
        while logger is not None:
            if any(not isinstance(one, _Tap) for one in logger.handlers):
                return
            taps += logger.handlers
            logger = logger.parent if logger.propagate else None
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and taps[:1] == [self]:
            last.handle(record)
