"""The access log: one line for each request at its end, without headers, tokens and queries."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.config.settings import logs
from gpuserve.config.settings.server import ERRORS, ServerSettings
from gpuserve.devices.names import OFF
from gpuserve.front.requests.inference import InferRequest

LOGGER: Final = "gpuserve.access"
#: The header with which a client names its request; it is echoed.
REQUEST_ID: Final = b"x-request-id"
MAX_ID_NBYTES: Final = 128
#: Limit of a path, and of other texts of a client, in a line.
_MAX_TEXT: Final = 512
#: A request has failed if its status is this or higher.
_FAILED: Final = 400


@dataclass(eq=False, slots=True)
class RequestNotes:
    """Values of one HTTP request or gRPC call, collected until its line is written. For a stream: the model
    of the first request, and the longest queue time, longest execution and largest batch of all.
    """

    #: The id in the header, "" if there was no usable one, and the generated id that replaces it.
    own_id: str
    made_id: str
    v2_id: str = ""
    model: str = ""
    version: str = ""
    requests: int = 0
    queue_s: float | None = None
    compute_s: float | None = None
    batch_size: int = 0

    @property
    def id(self) -> str:
        return self.own_id or self.v2_id or self.made_id

    def submitted(self, request: InferRequest) -> None:
        self.requests += 1
        if self.requests == 1:
            self.model, self.version = request.model_name, request.model_version
            self.v2_id = usable_id(request.id)

    def id_of(self, request: InferRequest) -> str:
        """Return the id of one request of a stream; for other calls the same as ``id``."""
        return self.own_id or usable_id(request.id) or self.made_id

    def dispatched(self, queue_s: float, batch_size: int) -> None:
        self.queue_s = max(queue_s, self.queue_s or 0.0)
        self.batch_size = max(batch_size, self.batch_size)

    def computed(self, compute_s: float) -> None:
        self.compute_s = max(compute_s, self.compute_s or 0.0)


def notes_of(request: InferRequest) -> RequestNotes | None:
    """Return the notes of the call that contained a request, or None if no line will be written for it."""
    notes: RequestNotes | None = getattr(request.sender, "notes", None)
    return notes


def id_for_worker(request: InferRequest) -> str:
    """Return the id for a callable's log lines: the request's own if another process logs the call."""
    notes = notes_of(request)
    return usable_id(request.id) if notes is None else notes.id_of(request)


class AccessLog:
    """The writer of one process's lines. ``write`` receives a line with its newline, and must not block."""

    def __init__(
        self,
        what: str,
        log_format: str,
        write: Callable[[str], None] = logs.write_lines,
        ids: Iterator[str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._failures_only = what == ERRORS
        self._form = _json_line if log_format == "json" else _text_line
        self._write = write
        self._ids = ids or request_ids()
        self._clock = clock

    @classmethod
    def of(cls, settings: ServerSettings) -> AccessLog | None:
        """Return the log that the settings ask for, or None."""
        return None if settings.access_log == OFF else cls(settings.access_log, settings.log_format)

    def notes(self, header: bytes) -> RequestNotes:
        """Return the notes of a request that starts now. ``header`` is the client's id for it, or b""."""
        own_id = usable_id(header.decode("latin-1")) if header else ""
        return RequestNotes(own_id, "" if own_id else next(self._ids))

    def ended(self, fields: dict[str, Any], notes: RequestNotes) -> None:
        """Write the line of a request. ``fields`` are the values known to its connection, without None."""
        has_failed = fields.get("grpc_status") or fields.get("status", 0) >= _FAILED
        if self._failures_only and not (fields.get("aborted") or has_failed):
            return
        fields["request_id"] = notes.id
        if notes.model:
            fields["model"] = notes.model[:_MAX_TEXT]
            if notes.version:
                fields["version"] = notes.version[:_MAX_TEXT]
        if notes.requests > 1:
            fields["requests"] = notes.requests
        if notes.batch_size:
            fields["batch_size"] = notes.batch_size
        for name, value in (("queue_s", notes.queue_s), ("compute_s", notes.compute_s)):
            if value is not None:
                fields[name] = round(value, 6)
        self._write(self._form(self._clock(), fields))


def request_ids() -> Iterator[str]:
    """Return generated request ids: a random prefix and a counter."""
    chance = secrets.token_hex(6)
    return (f"{chance}-{number:x}" for number in itertools.count(1))


def usable_id(text: str) -> str:
    """Return an id if it is short, printable ASCII, so that it can be echoed; else ""."""
    return text if 0 < len(text) <= MAX_ID_NBYTES and text.isascii() and text.isprintable() else ""


def _json_line(now: float, fields: dict[str, Any]) -> str:
    line = {
        "ts": logs.timestamp(now),
        "level": "info",
        "logger": LOGGER,
        "msg": _summary(fields),
        "pid": os.getpid(),
        **{name: _short(value) for name, value in fields.items()},
    }
    return json.dumps(line) + "\n"


def _text_line(now: float, fields: dict[str, Any]) -> str:
    rest = " ".join(f"{name}={_plain(value)}" for name, value in fields.items() if name not in _IN_SUMMARY)
    return f"{logs.timestamp(now)} access {_summary(fields)} {rest}\n"


_IN_SUMMARY: Final = frozenset({"method", "path", "status", "grpc_status", "aborted"})


def _summary(fields: dict[str, Any]) -> str:
    end = "aborted" if fields.get("aborted") else fields.get("grpc_status", fields.get("status", "-"))
    return f"{_plain(fields['method'])} {_plain(fields['path'])} {end}"


def _short(value: Any) -> Any:
    return value[:_MAX_TEXT] if isinstance(value, str) else value


def _plain(value: Any) -> str:
    text = str(_short(value))
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return text.encode("unicode_escape").decode("ascii").replace(" ", "\\x20")
