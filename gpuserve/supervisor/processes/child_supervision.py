"""Supervision of one child: its channel, its death, the relay of its output into the log (``LogLines``), and
the stacks of its threads. A child writes its stacks (``faulthandler``) to a shared file, which counts as
complete when it has stopped growing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import gpuserve_worker
from gpuserve.config.settings import logs
from gpuserve.supervisor.control.heartbeat import STOPPED, describe_process_state, state_of
from gpuserve.supervisor.control.reactor import Channel, Reactor
from gpuserve.supervisor.processes.child_process import Child

logger = logging.getLogger(__name__)

_CHUNK_NBYTES: Final = 64 * 1024
#: More reads than a full pipe needs.
_DRAIN_READS: Final = 16
#: A longer line is cut, so that a child cannot fill the supervisor's memory.
MAX_LINE_NBYTES: Final = 64 * 1024
#: Interval between two reports of dropped lines.
_REPORT_INTERVAL_S: Final = 1.0


class MonitoredChild:
    """A child, the supervisor's end of its channel, and its output. Owner of all three until ``close()``.
    ``fields`` identify the child in each log line. ``rate`` limits its output. ``lines`` stores what is
    logged.
    """

    def __init__(
        self,
        process: Child,
        channel: Channel,
        fields: dict[str, str],
        reactor: Reactor,
        rate: OutputRate | None = None,
        lines: LogLines | None = None,
    ) -> None:
        self.process = process
        self.channel = channel
        self.stacks = ChildStacks(process, reactor)
        self._reactor = reactor
        self._relay = OutputRelay(process.output, fields, reactor, rate or OutputRate(0, 0), lines)
        self._exit_reason: str | None = None

    def open(self, on_message: Callable[[], None], on_died: Callable[[], None]) -> None:
        self._reactor.watch(self.process.pidfd, on_died)
        self._reactor.watch(self.channel.fileno(), on_message)
        self._relay.open()

    def send(self, message: Any, fds: Sequence[int] = ()) -> bool:
        """Send a message. Return False if the child is alive and does not read."""
        try:
            self.channel.send(message, fds)
        except TimeoutError:
            return False
        return True

    def may_log(self, text: str) -> bool:
        """Return whether the rate limit admits a record of the child; if not, the record is counted."""
        return self._relay.admits(len(text))

    def stop_listening(self) -> None:
        self._reactor.unwatch(self.channel.fileno())

    def last_messages(self) -> Iterator[Any]:
        """Yield the unread messages of a dead child. Raise ``WireError`` or ``OSError`` if malformed."""
        self.stop_listening()
        while self.channel.pending() and (message := self.channel.receive()) is not None:
            yield message

    def exit_reason(self) -> str:
        """Reap the child, which has died or was killed, and return why it ended."""
        if self._exit_reason is None:
            self._exit_reason = self.process.exit_reason()
        return self._exit_reason

    def close(self) -> None:
        self.exit_reason()
        self.stacks.close()
        self._reactor.unwatch(self.process.pidfd)
        self.stop_listening()
        self._relay.close()
        self.process.close()
        self.channel.close()


@dataclass(eq=False)
class OutputRelay:
    """The relay of one child's stdout and stderr, with ``fields`` in each line. Without a descriptor the
    child writes to our own. Lines over the rate limit are dropped, and one line a second reports how many.
    """

    _fd: int | None
    _fields: Mapping[str, str]
    _reactor: Reactor
    _rate: OutputRate
    _lines: LogLines | None = None
    _rest: bytes = b""
    #: Dropped lines that were not reported yet.
    _dropped: int = 0

    def open(self) -> None:
        if self._fd is not None:
            self._reactor.watch(self._fd, self._on_readable)

    def close(self) -> None:
        """Relay the last output of a dead child. Do not wait: its children may hold the pipe open."""
        if self._fd is not None:
            self._reactor.unwatch(self._fd)
            with contextlib.suppress(BlockingIOError):
                for _ in range(_DRAIN_READS):  # a bound, because those children may write without end
                    if chunk := os.read(self._fd, _CHUNK_NBYTES):
                        self._add(chunk)
            self._add(b"")
        self._report_dropped()

    def admits(self, nbytes: int) -> bool:
        """Return whether a line may be logged. The line is counted against the rate limit, or as dropped."""
        if self._rate.is_spent(time.monotonic()):
            self._drop(1)
            return False
        self._rate.spend(nbytes)
        return True

    def _on_readable(self) -> None:
        assert self._fd is not None
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._fd, _CHUNK_NBYTES)
            self._add(chunk)
            if not chunk:
                self._reactor.unwatch(self._fd)

    def _add(self, chunk: bytes) -> None:
        text, start = self._rest + chunk, 0
        while (end := text.find(b"\n", start)) >= 0:
            if self._rate.is_spent(time.monotonic()):  # in a flood, lines are only counted
                self._drop(text.count(b"\n", start))
                start = text.rfind(b"\n") + 1
                break
            self._emit(text[start:end])
            start = end + 1
        self._rest = text[start:]
        if not chunk or len(self._rest) > MAX_LINE_NBYTES:
            self._emit(self._rest)
            self._rest = b""

    def _emit(self, line: bytes) -> None:
        if line and self.admits(len(line)):
            text = logs.relay_line(line[:MAX_LINE_NBYTES], self._fields)
            logs.write_lines(f"{text}\n")
            if self._lines is not None:
                self._lines.add(text, self._fields)

    def _drop(self, lines: int) -> None:
        if not self._dropped:
            self._reactor.call_later(_REPORT_INTERVAL_S, self._report_dropped)
        self._dropped += lines

    def _report_dropped(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            limits = "max_output_lines_per_s or max_output_nbytes_per_s"
            text = "%d lines of its output were dropped: they came faster than %s"
            logger.warning(text, dropped, limits, extra=self._fields)


#: Large enough for a hundred threads with a hundred frames each.
MAX_NBYTES: Final = 48 << 10
#: Interval between two polls of the file size, and the polls without growth after which the file is complete.
_POLL_S: Final = 0.02
_QUIET_POLLS: Final = 3
#: Polls of an empty file, 1 s, before the forced signal: C code probably holds the child's GIL. A child that
#: merely lacks CPU time should answer sooner, because the forced signal can crash a child whose threads run.
#: A child that is killed afterwards gets the forced signal after 0.1 s.
_FORCE_POLLS: Final = 50
_FORCE_ENDING_POLLS: Final = 5
#: Polls after which the child counts as unable to answer.
_MAX_POLLS: Final = 75

#: Receives the stacks, or the reason why there are none. Called once.
OnStacks: TypeAlias = Callable[[str], None]


class ChildStacks:
    """The stacks of one child, until ``close()``. Concurrent requests get the same answer."""

    def __init__(self, process: Child, reactor: Reactor) -> None:
        self._process = process
        self._reactor = reactor
        self._waiting: list[OnStacks] = []
        self._nbytes = 0
        self._polls = 0
        self._force_polls = _FORCE_POLLS
        self._quiet_polls = 0
        self._is_closed = False

    def ask(self, on_stacks: OnStacks, *, is_ending: bool = False) -> None:
        """Request the child's stacks, or the reason why there are none. ``is_ending``: the child is killed
        afterwards, so that a crash would do no harm.
        """
        self._waiting.append(on_stacks)
        if len(self._waiting) > 1:
            return
        self._force_polls = _FORCE_ENDING_POLLS if is_ending else _FORCE_POLLS
        self._nbytes = self._polls = self._quiet_polls = 0
        fd = self._process.stacks
        if fd is not None and state_of(self._process.pid) not in STOPPED:
            os.lseek(fd, 0, os.SEEK_SET)  # moves the child's descriptor as well: both share one open file
            os.ftruncate(fd, 0)  # last: a child that still answers an earlier request may write at any time
            if self._process.ask_stacks():
                self._reactor.call_later(_POLL_S, self._poll)
                return
        self._answer(missing_stacks_reason(self._process.pid))

    def close(self) -> None:
        """Answer pending requests, because the child has ended."""
        self._is_closed = True
        self._answer(missing_stacks_reason(self._process.pid))

    def _poll(self) -> None:
        if self._is_closed:
            return
        assert self._process.stacks is not None
        nbytes = os.fstat(self._process.stacks).st_size
        self._polls += 1
        self._quiet_polls = self._quiet_polls + 1 if 0 < nbytes == self._nbytes else 0
        self._nbytes = nbytes
        if not nbytes and self._polls == self._force_polls:
            self._process.ask_stacks(forced=True)
        if self._quiet_polls < _QUIET_POLLS and self._polls < _MAX_POLLS:
            self._reactor.call_later(_POLL_S, self._poll)
            return
        text = os.pread(self._process.stacks, MAX_NBYTES, 0).decode("utf-8", "replace").replace("\0", "")
        self._answer(readable_stacks(text) if text else missing_stacks_reason(self._process.pid))

    def _answer(self, text: str) -> None:
        waiting, self._waiting = self._waiting, []
        for on_stacks in waiting:
            on_stacks(text)


_HEAD: Final = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(.*) \(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
#: Frames that are not user code: packages, the standard library, modules that are frozen into Python.
_NOT_USERS: Final = re.compile(r"/site-packages/|/dist-packages/|/lib(64)?/python3|^<(frozen|string)")
_HERE: Final = Path(gpuserve_worker.__file__).parent.parent
_OURS: Final = (f"{_HERE}/gpuserve/", f"{_HERE}/gpuserve_worker/")
#: Two threads of each worker that only wait: for messages of the supervisor, and for the signal for stacks.
_WAITING_THREADS: Final = (
    "/gpuserve_worker/execution/lifecycle.py",
    "/gpuserve_worker/protocol/stack_signals.py",
)
#: The outermost frame of a program's main thread.
_FOOT: Final = ("<frozen runpy>", "/runpy.py")


def missing_stacks_reason(pid: int) -> str:
    """Return the reason why a process shows no stacks: the state of the process."""
    return f"(no stacks of process {pid}: {describe_process_state(pid)})"


def readable_stacks(text: str) -> str:
    """Return the stacks with the main thread first, and without the worker's threads that only wait."""
    threads = [
        lines
        for lines in _threads(text)
        if not any(file in line for file in _WAITING_THREADS for line in lines)
    ]
    lines = []
    for thread in sorted(threads, key=lambda one: not _is_main(one)):
        # "Current" marks the thread that got the signal, which means nothing here.
        head = thread[0].replace("Current thread", "Thread")
        lines += [head.replace("Thread", "Main thread", 1) if _is_main(thread) else head, *thread[1:]]
    return "\n".join(lines) or text.strip()


def user_frame(text: str) -> str:
    """Return the innermost frame of user code, first of the main thread, as "FILE:LINE in NAME", or ""."""
    for thread in sorted(_threads(text), key=lambda one: not _is_main(one)):
        for line in thread[1:]:
            frame = _FRAME.fullmatch(line)
            if frame and not (_NOT_USERS.search(frame["file"]) or frame["file"].startswith(_OURS)):
                return f"{frame['file']}:{frame['line']} in {frame['name']}"
    return ""


def _threads(text: str) -> Iterator[list[str]]:
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


# ---- log lines ------------------------------------------------------------------------------------


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
        """Write a warning to stderr if logging is not configured, as Python does without any handler, but in
        our format: Python's shows neither the model nor the instance.
        """
        logger: logging.Logger | None = logging.getLogger(record.name)
        own: list[logging.Handler] = []
        while logger is not None:
            if any(not isinstance(handler, _LogLineHandler) for handler in logger.handlers):
                return
            own += logger.handlers
            logger = logger.parent if logger.propagate else None
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and own[:1] == [self]:
            line = {"msg": logs.TextFormatter().format(record), "levelno": record.levelno}
            last.handle(logging.makeLogRecord(line))


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
