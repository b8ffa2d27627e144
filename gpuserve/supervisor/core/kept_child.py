"""A child that is kept: its channel is listened to, its output goes line by line into the log of the
supervisor, and its death is noticed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from gpuserve.control.channel import Channel
from gpuserve.control.reactor import Reactor
from gpuserve.settings.logs import relay_line
from gpuserve.supervisor.core.processes import Child

_CHUNK_NBYTES: Final = 64 * 1024
#: More than a pipe holds, in reads.
_DRAIN_READS: Final = 16
#: A line longer than this is cut: a child must not make the supervisor hoard memory.
MAX_LINE_NBYTES: Final = 64 * 1024


class KeptChild:
    """A child, the supervisor's end of its channel, and its output. Owner of all three, until ``close()``.

    ``fields`` name the child in each line of the log.
    """

    def __init__(self, process: Child, channel: Channel, fields: dict[str, str], reactor: Reactor) -> None:
        self.process = process
        self.channel = channel
        self._reactor = reactor
        self._relay = OutputRelay(process.output, fields, reactor)
        self._exit_reason: str | None = None

    def open(self, on_message: Callable[[], None], on_died: Callable[[], None]) -> None:
        """Call back from now on when the channel is readable, and when the child has died."""
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
        self._reactor.unwatch(self.process.pidfd)
        self.stop_listening()
        self._relay.close()
        self.process.close()
        self.channel.close()


class OutputRelay:
    """One child's stdout and stderr, ``fields`` in each line; without a descriptor it writes to our own."""

    def __init__(self, fd: int | None, fields: Mapping[str, str], reactor: Reactor) -> None:
        self._fd = fd
        self._fields = dict(fields)
        self._reactor = reactor
        self._rest = b""

    def open(self) -> None:
        if self._fd is not None:
            self._reactor.watch(self._fd, self._on_readable)

    def close(self) -> None:
        """Pass on all that a dead child left. Its own children may hold the pipe open: no waiting."""
        if self._fd is None:
            return
        self._reactor.unwatch(self._fd)
        with contextlib.suppress(BlockingIOError):
            for _ in range(_DRAIN_READS):  # and a talkative one does not keep us here
                if chunk := os.read(self._fd, _CHUNK_NBYTES):
                    self._take(chunk)
        self._take(b"")

    def _on_readable(self) -> None:
        assert self._fd is not None
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._fd, _CHUNK_NBYTES)
            self._take(chunk)
            if not chunk:
                self._reactor.unwatch(self._fd)

    def _take(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._emit(line)
        if not chunk or len(self._rest) > MAX_LINE_NBYTES:
            self._emit(self._rest)
            self._rest = b""

    def _emit(self, line: bytes) -> None:
        if not line:
            return
        # Whoever read our stderr may have gone away; that is no reason to stop serving.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(relay_line(line[:MAX_LINE_NBYTES], self._fields) + "\n")
            sys.stderr.flush()
