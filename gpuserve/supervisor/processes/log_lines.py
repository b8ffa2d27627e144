"""The last log lines of workers, front and this process, and the rate limit for output of children."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from gpuserve.config.settings import logs
from gpuserve.supervisor.control.reactor import Reactor

#: Limits of the lines that are kept.
KEPT_LINES: Final = 1000
KEPT_NBYTES: Final = 512 << 10


class LogLine(NamedTuple):
    """One line, or one record with its traceback, with its number. A worker's line has the worker's model."""

    number: int
    time_s: float
    model: str
    instance: str
    level: str
    text: str

    def document(self) -> dict[str, Any]:
        about = {"model": self.model, "instance": self.instance, "level": self.level}
        named = {name: value for name, value in about.items() if value}
        head = {"time": round(self.time_s, 3), "number": self.number, "kind": "log"}
        return {**head, **named, "line": self.text}


class LogLines:
    """The log lines of one server, from ``open()`` to ``close()``. ``subscriber`` gets each line."""

    def __init__(self, reactor: Reactor, clock: Callable[[], float] = time.time) -> None:
        self.subscriber: Callable[[LogLine], None] = lambda _: None
        self._clock = clock
        self._lines: deque[LogLine] = deque()
        self._nbytes = 0
        self._number = 0
        self._handler = _LogLineHandler(reactor, self)

    def of(self, model: str = "") -> list[LogLine]:
        return [line for line in self._lines if not model or line.model == model]

    def add(self, text: str, fields: Mapping[str, str], level: str = "") -> None:
        """Add a line, in the reactor's thread."""
        self._number += 1
        about = fields.get("model", ""), fields.get("instance", "")
        line = LogLine(self._number, self._clock(), *about, level, text)
        self._lines.append(line)
        self._nbytes += len(text)
        while len(self._lines) > KEPT_LINES or (self._nbytes > KEPT_NBYTES and len(self._lines) > 1):
            self._nbytes -= len(self._lines.popleft().text)
        self.subscriber(line)

    def open(self) -> None:
        """Add the log records of this process, of all its threads, from now on."""
        self._handler.thread = threading.get_ident()
        logging.getLogger(logs.ROOT).addHandler(self._handler)

    def close(self) -> None:
        logging.getLogger(logs.ROOT).removeHandler(self._handler)


class _LogLineHandler(logging.Handler):
    """A logging handler that passes records to the reactor's thread, which adds them as lines."""

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
        """Write a warning to stderr if logging is not configured, as Python does without any handler."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        own: list[logging.Handler] = []
        while logger is not None:
            if any(not isinstance(handler, _LogLineHandler) for handler in logger.handlers):
                return
            own += logger.handlers
            logger = logger.parent if logger.propagate else None
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and own[:1] == [self]:
            last.handle(record)


#: Burst of the rate limit, in seconds of the rate: enough for a traceback, or for a library that loads.
BURST_S: Final = 10.0
_UNLIMITED: Final = float(1 << 60)


class OutputRate:
    """A rate limit of two token buckets, for lines and bytes (0: no limit), by a monotonic clock. Pure."""

    def __init__(self, lines_per_s: float, nbytes_per_s: float) -> None:
        self._rates = (lines_per_s or _UNLIMITED, nbytes_per_s or _UNLIMITED)
        self._left = [rate * BURST_S for rate in self._rates]
        self._filled_at = -math.inf

    def is_spent(self, now: float) -> bool:
        elapsed_s, self._filled_at = now - self._filled_at, now
        for index, rate in enumerate(self._rates):
            self._left[index] = min(self._left[index] + elapsed_s * rate, rate * BURST_S)
        return min(self._left) < 1

    def spend(self, nbytes: int) -> None:
        """Count a line, which may exceed the rest of the bucket; later lines wait until it is refilled."""
        self._left[0] -= 1
        self._left[1] -= nbytes
