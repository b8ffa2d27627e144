"""The log of the command line: log settings, line formats, and a writer that never blocks. Only the loggers
``gpuserve`` and ``py.warnings`` are changed: a program that uses gpuserve as a library keeps its own logging.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TextIO

from gpuserve.config.settings.values import mask_userinfo

#: The name of the log settings in messages between front and supervisor.
LOG: Final = "log"
DEFAULT: Final = "default"
ISO8601: Final = "ISO8601"


class LogSettings(NamedTuple):
    """The log settings that clients can read and change, by the names of the protocol. Critical records are
    always logged. ``log_verbose_level`` above 0 enables debug records; ``log_format`` is the form of the time
    in text lines: "default" or "ISO8601". Clients cannot change ``log_file``; "" is stderr.
    """

    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int
    log_format: str

    @classmethod
    def of_level(cls, log_level: str) -> LogSettings:
        """Return the settings that ``log_level`` ("debug", "info", "warning", "error") stands for."""
        least = logging.getLevelNamesMapping()[log_level.upper()]
        return cls(
            log_file="",
            log_info=least <= logging.INFO,
            log_warning=least <= logging.WARNING,
            log_error=True,
            log_verbose_level=int(least <= logging.DEBUG),
            log_format=DEFAULT,
        )

    @property
    def level(self) -> int:
        """Return the least severe level of ``logging`` that the settings enable."""
        levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
        return next((level for level in levels if self.lets_through(level)), logging.CRITICAL)

    def lets_through(self, level: int) -> bool:
        """Return whether records of a level are logged."""
        switches = (
            (logging.CRITICAL, True),
            (logging.ERROR, self.log_error),
            (logging.WARNING, self.log_warning),
            (logging.INFO, self.log_info),
        )
        return next((on for least, on in switches if level >= least), self.log_verbose_level > 0)


#: Capacity of the queue of lines, in bytes of memory. A reader that pauses for a moment loses nothing.
MAX_QUEUED_NBYTES: Final = 8 << 20
#: Memory of a queued line besides its text.
_LINE_NBYTES: Final = 64
_WRITE_NBYTES: Final = 64 * 1024
#: Seconds that the end of a process waits for the reader.
_FLUSH_TIMEOUT_S: Final = 1.0


class LineWriter:
    """A queue of lines and a thread that writes them to a descriptor that may block, such as an unread pipe.
    Callers never wait. When the queue is full, new lines are dropped until half of the queue is written;
    ``gap`` returns the line with the number of lost lines, and the error that prevented their writing, or "".
    """

    def __init__(self, fd: int, gap: Callable[[int, str], str], max_nbytes: int = MAX_QUEUED_NBYTES) -> None:
        self._fd = fd
        self._gap = gap
        self._max_nbytes = max_nbytes
        self._waiting: deque[bytes] = deque()
        #: Size of the queued lines and of the lines that are being written.
        self._nbytes = 0
        self._dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Queue a line, including its line end, or drop it; return at once."""
        data = line.encode("utf-8", "backslashreplace")
        with self._changed:
            full = self._nbytes > 0 and self._nbytes + _cost(data) > self._max_nbytes
            if full or self._dropped:
                self._dropped += 1
                return
            self._put(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpuserve-log", daemon=True)
                self._thread.start()

    def flush(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> None:
        """Wait until all lines are written, or until the timeout: the reader may have stopped."""
        with self._changed:
            self._changed.wait_for(lambda: not self._nbytes, timeout_s)

    def close(self) -> None:
        """Stop the thread once all lines are written; a later line starts a new thread."""
        self.flush()
        with self._changed:
            if self._nbytes or self._thread is None:
                return
            ended, self._ended, self._thread = self._thread, self._thread, None
            self._changed.notify_all()
        ended.join()

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._nbytes += _cost(data)
        self._changed.notify_all()

    def _run(self) -> None:
        # Only the main thread handles signals; a signal in this thread would not wake it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        failed, reason = 0, ""
        while lines := self._next():
            try:
                self._write(b"".join(lines))
            except OSError as error:  # the reader is gone, or a disk is full, which must not end the server
                lost, failed, reason = 0, failed + len(lines), str(error.strerror)
            else:
                lost, failed = failed, 0
            with self._changed:
                self._nbytes -= sum(map(_cost, lines))
                if lost:
                    self._put(self._gap(lost, reason).encode())
                if self._dropped and self._nbytes <= self._max_nbytes // 2:
                    dropped, self._dropped = self._dropped, 0
                    self._put(self._gap(dropped, "").encode())
                self._changed.notify_all()

    def _next(self) -> list[bytes]:
        """Wait for lines, and return as many as fit in one write; return [] when the writer is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended is threading.current_thread())
            if self._ended is threading.current_thread():
                return []
            lines = [self._waiting.popleft()]
            nbytes = len(lines[0])
            while self._waiting and (nbytes := nbytes + len(self._waiting[0])) <= _WRITE_NBYTES:
                lines.append(self._waiting.popleft())
            return lines

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # another process set the pipe to non-blocking
                select.select([], [self._fd], [])


def _cost(line: bytes) -> int:
    return len(line) + _LINE_NBYTES


ROOT: Final = "gpuserve"
#: Attributes from ``extra`` that are shown.
FIELDS: Final = ("model", "instance", "device")
#: An attribute from ``extra`` that is a list, and shown only in JSON.
REQUEST_IDS: Final = "request_ids"
_OUTPUT_LOGGER: Final = "gpuserve.output"
_WARNINGS_LOGGER: Final = "py.warnings"


class LogStream(logging.Handler):
    """The log handler of the CLI. Without a stream of its own the handler writes to the current
    ``sys.stderr``: a live table replaces it so that lines appear above the table. The stderr of the process
    itself may be an unread pipe, so a ``LineWriter`` writes to it.
    """

    def __init__(self, log_format: str, stream: TextIO | None) -> None:
        super().__init__()
        self.log_format = log_format
        self._stream = stream
        self._writer: LineWriter | None = None
        self._settings: LogSettings | None = None
        self.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())

    def adjust(self, settings: LogSettings) -> None:
        """Apply log settings. The time in JSON has one form."""
        self._settings = settings
        if self.log_format != "json":
            self.setFormatter(TextFormatter(iso8601=settings.log_format == ISO8601))

    def lets_through(self, record: logging.LogRecord) -> bool:
        return self._settings is None or self._settings.lets_through(record.levelno)

    def emit(self, record: logging.LogRecord) -> None:
        if not self.lets_through(record):
            return
        try:
            self.write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)

    def write(self, text: str) -> None:
        stream, own = self._stream or sys.stderr, sys.__stderr__
        if own is not None and stream is own:
            if self._writer is None:
                self._writer = LineWriter(own.fileno(), self._gap)
            self._writer.write(text)
        else:
            _write(stream, text)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        super().close()

    def _gap(self, dropped: int, reason: str) -> str:
        text = f"dropped {dropped} lines of the log: {reason or 'nothing reads stderr'}"
        fields = {"name": ROOT, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
        return f"{self.format(logging.makeLogRecord(fields))}\n"


class JsonFormatter(logging.Formatter):
    """A formatter of records as JSON objects: ts, level, logger, msg, pid, the attributes, and exc."""

    def format(self, record: logging.LogRecord) -> str:
        level, message = record.levelname.lower(), record.getMessage()
        head = {"ts": timestamp(record.created), "level": level, "logger": record.name, "msg": message}
        line: dict[str, Any] = {**head, "pid": record.process, **_fields_of(record)}
        if ids := [one for one in getattr(record, REQUEST_IDS, ()) if one]:
            line[REQUEST_IDS] = ids
        if trace := _traceback_of(record):
            line["exc"] = trace
        return mask_userinfo(json.dumps(line, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """A formatter of records as text: time, level, [model/instance], message, and a traceback below."""

    def __init__(self, *, iso8601: bool = False) -> None:
        super().__init__()
        self._is_iso8601 = iso8601

    def format(self, record: logging.LogRecord) -> str:
        if self._is_iso8601:
            moment = timestamp(record.created)
        else:
            local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
            moment = f"{local}.{int(record.created * 1000) % 1000:03d}"
        head = f"{moment} {record.levelname:<7}"
        line = f"{head} {_prefix(_fields_of(record))}{record.getMessage()}"
        if trace := _traceback_of(record):
            line += "\n" + trace
        return mask_userinfo(line)


def configure(log_format: str, settings: LogSettings, stream: TextIO | None = None) -> None:
    """Write the log and Python's warnings to a stream, stderr by default, as "text" or "json"."""
    logging.captureWarnings(True)
    handler = LogStream(log_format, stream)
    for name in (ROOT, _WARNINGS_LOGGER):
        logger = logging.getLogger(name)
        for earlier in [one for one in logger.handlers if isinstance(one, LogStream)]:
            logger.removeHandler(earlier)
        logger.addHandler(handler)
        logger.propagate = False
    adjust(settings)


def adjust(settings: LogSettings) -> None:
    """Apply log settings if ``configure`` was called: the log of a host program is not changed."""
    if (handler := _configured()) is not None:
        handler.adjust(settings)
        logging.getLogger(ROOT).setLevel(settings.level)


def write_lines(text: str) -> None:
    """Write lines that are no records to the stream of the log, or to ``sys.stderr``."""
    handler = _configured()
    if handler is None:
        _write(sys.stderr, text)
    else:
        handler.write(text)


def formatted(record: logging.LogRecord) -> str | None:
    """Return a record as in the log, without a line end, or None if the record is not logged."""
    handler = _configured()
    if handler is None:
        return TextFormatter().format(record)
    return handler.format(record) if handler.lets_through(record) else None


def relay_line(line: bytes, fields: Mapping[str, str]) -> str:
    """Return one line of a child's output as a line of this log, without a line end: in JSON a log object
    unchanged or an object with the line as ``msg``, in text the line behind the child's name in ``fields``.
    """
    text = line.decode("utf-8", "replace").rstrip("\r\n")
    if configured_format() != "json":
        return _prefix(fields) + text
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text) if text.startswith("{") else None
        if isinstance(found, dict) and "ts" in found and "level" in found:
            return text
    head = {"ts": timestamp(time.time()), "level": "info", "logger": _OUTPUT_LOGGER, "msg": text}
    of_child = {name: value for name, value in fields.items() if value}
    return json.dumps({**head, "pid": os.getpid(), **of_child}, ensure_ascii=False)


def configured_format() -> str:
    handler = _configured()
    return "text" if handler is None else handler.log_format


def _configured() -> LogStream | None:
    return next((one for one in logging.getLogger(ROOT).handlers if isinstance(one, LogStream)), None)


def _write(stream: TextIO | None, text: str) -> None:
    """Write to a stream; ignore errors: a reader that is gone must not end the server."""
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stream.write(text)
            stream.flush()


def timestamp(created: float) -> str:
    """Return seconds since the epoch as ISO 8601 in UTC, with milliseconds."""
    return datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields_of(record: logging.LogRecord) -> dict[str, str]:
    return {name: getattr(record, name) for name in FIELDS if getattr(record, name, "")}


def _traceback_of(record: logging.LogRecord) -> str:
    """Return the traceback of a record: of this process, or the text that a worker sent."""
    if record.exc_info and record.exc_info[0] is not None:
        return logging.Formatter().formatException(record.exc_info)
    return (record.exc_text or "").rstrip("\n")


def _prefix(fields: Mapping[str, str]) -> str:
    parts = [fields[name] for name in ("model", "instance") if fields.get(name)]
    return f"[{'/'.join(parts)}] " if parts else ""


def log_with_text(
    logger: logging.Logger, level: int, text: str, more: str, fields: Mapping[str, object]
) -> None:
    if not logger.isEnabledFor(level):
        return
    record = logger.makeRecord(logger.name, level, "", 0, text, (), None, extra=dict(fields))
    # Every Formatter of the standard library shows exc_text.
    record.exc_text = more or None
    logger.handle(record)


_PERIOD_S: Final = 10.0


class RateLimitedLog:
    """A logger of warnings that clients can cause: one line in ten seconds, with the number since."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._next_at = 0.0
        self._n_suppressed = 0

    def say(self, text: str, *arguments: Any) -> None:
        now = self._clock()
        if now < self._next_at:
            self._n_suppressed += 1
            return
        line = text % arguments
        if self._n_suppressed:
            line += f" ({self._n_suppressed} similar ones since the last line)"
        self._next_at, self._n_suppressed = now + _PERIOD_S, 0
        self._logger.warning("%s", line)
