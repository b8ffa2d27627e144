"""The log of the command line: how a line looks, and how a child's output becomes such lines. Only the CLI
calls ``configure``; only the loggers ``gpuserve`` and ``py.warnings`` are touched: a program that uses
gpuserve as a library keeps its own logging. In JSON every line is one object.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from gpuserve.settings.log import ISO8601, LogSettings
from gpuserve.settings.log_writer import LineWriter
from gpuserve.settings.urls import without_userinfo

ROOT: Final = "gpuserve"
#: Attributes that a record may bring in ``extra`` and that are shown.
FIELDS: Final = ("model", "instance", "device")
#: And one that is a list, and shown in JSON alone.
REQUEST_IDS: Final = "request_ids"
_OUTPUT_LOGGER: Final = "gpuserve.output"
_WARNINGS_LOGGER: Final = "py.warnings"


class LogStream(logging.Handler):
    """The CLI's handler. Without a stream of its own it writes to what ``sys.stderr`` is at that moment:
    a live table puts itself there so that lines appear above it. The stderr of the process itself may be a
    pipe that nobody reads, so its lines go by a ``LineWriter``.
    """

    def __init__(self, log_format: str, stream: TextIO | None) -> None:
        super().__init__()
        self.log_format = log_format
        self._stream = stream
        self._writer: LineWriter | None = None
        self._settings: LogSettings | None = None
        self.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())

    def adjust(self, settings: LogSettings) -> None:
        """Let through what the settings say, in the form that they say. JSON has one form of time."""
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
        """Write text that is a line already, or several."""
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

    def _gap(self, dropped: int) -> str:
        text = f"{dropped} lines of the log were dropped, because nobody read them"
        fields = {"name": ROOT, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
        return f"{self.format(logging.makeLogRecord(fields))}\n"


class JsonFormatter(logging.Formatter):
    """One JSON object a record: ts, level, logger, msg, pid, the fields it has, and exc."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            "pid": record.process,
            **_fields_of(record),
        }
        if ids := [one for one in getattr(record, REQUEST_IDS, ()) if one]:
            line[REQUEST_IDS] = ids
        if trace := _traceback_of(record):
            line["exc"] = trace
        return without_userinfo(json.dumps(line, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """Time, level, [model/instance], message; a traceback follows on its own lines."""

    def __init__(self, *, iso8601: bool = False) -> None:
        super().__init__()
        self._moment = timestamp if iso8601 else _local_moment

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self._moment(record.created)} {record.levelname:<7}"
        line = f"{head} {_prefix(_fields_of(record))}{record.getMessage()}"
        if trace := _traceback_of(record):
            line += "\n" + trace
        return without_userinfo(line)


def configure(log_format: str, log_level: str, stream: TextIO | None = None) -> None:
    """Send gpuserve's log and Python's warnings to a stream, ``sys.stderr`` by default.

    Args:
        log_format: "text" or "json".
        log_level: "debug", "info", "warning" or "error".
    """
    logging.captureWarnings(True)
    handler = LogStream(log_format, stream)
    for name in (ROOT, _WARNINGS_LOGGER):
        logger = logging.getLogger(name)
        for earlier in [one for one in logger.handlers if isinstance(one, LogStream)]:
            logger.removeHandler(earlier)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger(ROOT).setLevel(log_level.upper())


def adjust(settings: LogSettings) -> None:
    """Change what is logged, where ``configure`` was called: a host program's log is not ours to change."""
    if (handler := _configured()) is not None:
        handler.adjust(settings)
        logging.getLogger(ROOT).setLevel(settings.level)


def write(text: str) -> None:
    """Write lines that are no record to where the log goes, ``sys.stderr`` where nothing was configured."""
    handler = _configured()
    if handler is None:
        _write(sys.stderr, text)
    else:
        handler.write(text)


def formatted(record: logging.LogRecord) -> str | None:
    """One record as it is in the log, without a line end; None: it is not logged."""
    handler = _configured()
    if handler is None:
        return TextFormatter().format(record)
    return handler.format(record) if handler.lets_through(record) else None


def relay_line(line: bytes, fields: Mapping[str, str]) -> str:
    """One line of a child's output as a line of this log, without a line end.

    Under JSON a line that is a log object already stays as it is, and any other becomes the ``msg``
    of one. As text it gets the child's name in front. ``fields``: model, instance, device.
    """
    text = line.decode("utf-8", "replace").rstrip("\r\n")
    if configured_format() != "json":
        return _prefix(fields) + text
    if _is_log_object(text):
        return text
    wrapped: dict[str, Any] = {
        "ts": timestamp(time.time()),
        "level": "info",
        "logger": _OUTPUT_LOGGER,
        "msg": text,
        "pid": os.getpid(),
        **{name: value for name, value in fields.items() if value},
    }
    return json.dumps(wrapped, ensure_ascii=False)


def configured_format() -> str:
    """The format that the CLI chose; "text" where it has not configured anything."""
    handler = _configured()
    return "text" if handler is None else handler.log_format


def _configured() -> LogStream | None:
    return next((one for one in logging.getLogger(ROOT).handlers if isinstance(one, LogStream)), None)


def _write(stream: TextIO | None, text: str) -> None:
    """Write to a stream, unless whoever read it has gone away: that is no reason to stop serving."""
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stream.write(text)
            stream.flush()


def timestamp(created: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC, with milliseconds."""
    return datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _local_moment(created: float) -> str:
    """Seconds since the epoch as people here write them, with milliseconds."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
    return f"{moment}.{int(created * 1000) % 1000:03d}"


def _fields_of(record: logging.LogRecord) -> dict[str, str]:
    return {name: getattr(record, name) for name in FIELDS if getattr(record, name, "")}


def _traceback_of(record: logging.LogRecord) -> str:
    """The traceback of this process, or the one that a worker sent as text."""
    if record.exc_info and record.exc_info[0] is not None:
        return logging.Formatter().formatException(record.exc_info)
    return (record.exc_text or "").rstrip("\n")


def _prefix(fields: Mapping[str, str]) -> str:
    parts = [fields[name] for name in ("model", "instance") if fields.get(name)]
    return f"[{'/'.join(parts)}] " if parts else ""


def _is_log_object(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "ts" in found and "level" in found


def log_with_text(
    logger: logging.Logger, level: int, text: str, more: str, fields: Mapping[str, object]
) -> None:
    """Log a line with a text of several lines below it, where a traceback would be."""
    if not logger.isEnabledFor(level):
        return
    record = logger.makeRecord(logger.name, level, "", 0, text, (), None, extra=dict(fields))
    # Every Formatter of the standard library shows exc_text.
    record.exc_text = more or None
    logger.handle(record)
