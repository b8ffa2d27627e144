"""A child that is kept: its channel is listened to, its output goes line by line into the log of the
supervisor, and its death is noticed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from gpuserve.config.settings import logs
from gpuserve.control.channel import Channel
from gpuserve.control.reactor import Reactor
from gpuserve.supervisor.core.log_lines import LogLines
from gpuserve.supervisor.core.output_rate import OutputRate
from gpuserve.supervisor.core.processes import Child
from gpuserve.supervisor.core.stacks import ChildStacks

logger = logging.getLogger(__name__)

_CHUNK_NBYTES: Final = 64 * 1024
#: More than a pipe holds, in reads.
_DRAIN_READS: Final = 16
#: A line longer than this is cut: a child must not make the supervisor hoard memory.
MAX_LINE_NBYTES: Final = 64 * 1024
#: What is dropped is told this often.
_TELL_INTERVAL_S: Final = 1.0


class KeptChild:
    """A child, the supervisor's end of its channel, and its output. Owner of all three, until ``close()``.
    ``fields`` name the child in each line of the log. ``rate`` is how much of it is logged; None: all.
    ``lines`` keeps what is logged, where it is to be seen again.
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
        self._relay = OutputRelay(process.output, fields, reactor, rate, lines)
        self._exit_reason: str | None = None

    def open(self, on_message: Callable[[], None], on_died: Callable[[], None]) -> None:
        self._reactor.watch(self.process.pidfd, on_died)
        self._reactor.watch(self.channel.fileno(), on_message)
        self._relay.open()

    def send(self, message: Any, fds: Sequence[int] = ()) -> bool:
        """Send a message, and say whether the child reads what it is told; a dead one counts as reading."""
        try:
            self.channel.send(message, fds)
        except TimeoutError:
            return False
        return True

    def may_log(self, text: str) -> bool:
        """Whether the rate admits a record of the child's; one that it does not is counted."""
        return self._relay.admits(len(text))

    def stop_listening(self) -> None:
        self._reactor.unwatch(self.channel.fileno())

    def last_messages(self) -> Iterator[Any]:
        """Give what a dead child has said and nobody has read; ``WireError``, ``OSError`` for nonsense."""
        self.stop_listening()
        while self.channel.pending() and (message := self.channel.receive()) is not None:
            yield message

    def exit_reason(self) -> str:
        """Reap the child, which has died or was killed, and say why it ended."""
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


class OutputRelay:
    """One child's stdout and stderr, ``fields`` in each line; without a descriptor it writes to our own.
    What is over the rate is dropped, and a line a second says how much.
    """

    def __init__(
        self,
        fd: int | None,
        fields: Mapping[str, str],
        reactor: Reactor,
        rate: OutputRate | None = None,
        lines: LogLines | None = None,
    ) -> None:
        self._fd = fd
        self._fields = dict(fields)
        self._reactor = reactor
        self._rate = rate or OutputRate(0, 0)
        self._lines = lines
        self._rest = b""
        #: Lines that were dropped and not told yet.
        self._dropped = 0

    def open(self) -> None:
        if self._fd is not None:
            self._reactor.watch(self._fd, self._on_readable)

    def close(self) -> None:
        """Pass on all that a dead child left. Its own children may hold the pipe open: no waiting."""
        if self._fd is not None:
            self._reactor.unwatch(self._fd)
            with contextlib.suppress(BlockingIOError):
                for _ in range(_DRAIN_READS):  # and a talkative one does not keep us here
                    if chunk := os.read(self._fd, _CHUNK_NBYTES):
                        self._take(chunk)
            self._take(b"")
        self._tell_dropped()

    def admits(self, nbytes: int) -> bool:
        """Whether a line may be logged, which is counted, or dropped."""
        if self._rate.is_spent(time.monotonic()):
            self._drop(1)
            return False
        self._rate.spend(nbytes)
        return True

    def _on_readable(self) -> None:
        assert self._fd is not None
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._fd, _CHUNK_NBYTES)
            self._take(chunk)
            if not chunk:
                self._reactor.unwatch(self._fd)

    def _take(self, chunk: bytes) -> None:
        text, start = self._rest + chunk, 0
        while (end := text.find(b"\n", start)) >= 0:
            if self._rate.is_spent(time.monotonic()):  # a flood costs no more than to count its lines
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
            logs.write(f"{text}\n")
            if self._lines is not None:
                self._lines.add(text, self._fields)

    def _drop(self, lines: int) -> None:
        if not self._dropped:
            self._reactor.call_later(_TELL_INTERVAL_S, self._tell_dropped)
        self._dropped += lines

    def _tell_dropped(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            limits = "max_output_lines_per_s or max_output_nbytes_per_s"
            text = "%d lines of its output were dropped: they came faster than %s"
            logger.warning(text, dropped, limits, extra=self._fields)
