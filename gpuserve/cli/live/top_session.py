"""A session of ``gpuserve top``: events, keys and answers reach one loop, which draws the screen."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live

from gpuserve.cli.live.event_client import EventStream, chosen_kinds
from gpuserve.cli.live.terminal_keys import Terminal
from gpuserve.cli.live.top_screen import QUIT, KeyCommand, Screen
from gpuserve.core.errors import ControlError
from gpuserve.core.event_log import EventKind
from gpuserve.supervisor.control.operator_client import ask

#: Interval of attempts to reach a server that has ended.
_RETRY_S: Final = 1.0
#: Interval at which the thread of events checks for the end of the session.
_POLL_S: Final = 0.5
#: The characters that a terminal sends for one key.
_KEY: Final = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_SAMPLE: Final = frozenset({EventKind.SAMPLE})


def run_top(server: str | None, sort: str, containing: str) -> None:
    """Show the screen until ``q`` or Ctrl-C. Raise ControlError if there is no such server."""
    ask(server, "status", {}, lambda _: None)  # report a wrong address before the screen opens
    with Terminal(sys.stdin.fileno()) as terminal:
        TopSession(server, Screen(sort, containing), Console(), terminal).run()


def print_models(server: str | None, sort: str, containing: str) -> None:
    """Print the table of all models once."""
    screen, console = Screen(sort, containing), Console()
    screen.add_event(first_sample(server))
    for line in screen.report(console.width):
        console.print(line, no_wrap=True, crop=False)


def print_samples(server: str | None, *, once: bool) -> None:
    """Print samples as JSON, one a line, until the server ends or after the first."""
    if once:
        sys.stdout.write(json.dumps(first_sample(server), ensure_ascii=False) + "\n")
        return
    with EventStream(server, _SAMPLE) as stream:
        for sample in stream:
            sys.stdout.write(json.dumps(sample, ensure_ascii=False) + "\n")
            sys.stdout.flush()


def first_sample(server: str | None) -> dict[str, Any]:
    """Return the first sample of a server that has rates; raise ControlError if there is no server."""
    with EventStream(server, _SAMPLE) as stream:
        stream.next()  # has counters but no rates
        sample = stream.next()
    if sample is None:
        raise ControlError("the server has ended")
    return sample


class TopSession:
    """A session of ``gpuserve top`` at a terminal. The server may end and come back meanwhile."""

    def __init__(self, server: str | None, screen: Screen, console: Console, terminal: Terminal) -> None:
        self._server = server
        self._screen = screen
        self._console = console
        self._terminal = terminal
        #: Calls from other threads and from signal handlers that the loop has to make.
        self._pending_calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._is_over = threading.Event()

    def run(self) -> None:
        """Draw until ``q`` or Ctrl-C. Must run in the main thread, because it handles signals."""
        threads = [
            threading.Thread(target=one, name=f"gpuserve-top-{name}", daemon=True)
            for name, one in (("events", self._receive_events), ("keys", self._read_keys))
        ]
        with self._signals(), self._live:
            for one in threads:
                one.start()
            try:
                self._loop()
            except KeyboardInterrupt:
                pass
            finally:
                self._is_over.set()
                self._terminal.end()
        for one in threads:
            one.join()

    def _loop(self) -> None:
        self._draw()
        while not self._is_over.is_set():
            self._pending_calls.get()()
            while not self._pending_calls.empty():  # draw once for several calls
                self._pending_calls.get()()
            self._draw()

    def _draw(self) -> None:
        size = self._console.size
        self._live.update(Group(*self._screen.lines(size.width, size.height)), refresh=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        wanted = {signal.SIGWINCH: lambda: None, signal.SIGTSTP: self._pause, signal.SIGTERM: self._end}
        before = {
            number: signal.signal(number, lambda *_, what=what: self._pending_calls.put(what))
            for number, what in wanted.items()
        }
        try:
            yield
        finally:
            for number, one in before.items():
                signal.signal(number, one)

    def _pause(self) -> None:
        """Restore the terminal, and stop this process until the shell continues it."""
        self._live.stop()
        self._terminal.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._terminal.wake()
        self._live.start()

    def _end(self) -> None:
        self._is_over.set()

    def _read_keys(self) -> None:
        while (typed := self._terminal.read()) is not None:
            for key in _KEY.findall(typed):
                self._pending_calls.put(partial(self._handle_key, key))
        self._pending_calls.put(self._end)

    def _handle_key(self, key: str) -> None:
        command = self._screen.press_key(key)
        if command is QUIT:
            self._end()
        elif command is not None:
            threading.Thread(target=self._ask, args=(command,), daemon=True).start()

    def _ask(self, command: KeyCommand) -> None:
        try:
            outcome = ask(self._server, command.verb, command.arguments, self._show_notice)
        except ControlError as error:
            self._show_notice(str(error))
        else:
            self._show_notice(outcome.text or f"done: {command.question}")

    def _show_notice(self, text: str) -> None:
        self._pending_calls.put(partial(setattr, self._screen, "notice", text))

    def _receive_events(self) -> None:
        kinds = chosen_kinds(()) | _SAMPLE
        while not self._is_over.is_set():
            try:
                with EventStream(self._server, kinds, past=True) as stream:
                    self._show_notice("")
                    while not (stream.is_over or self._is_over.is_set()):
                        if (event := stream.next(_POLL_S)) is not None:
                            self._pending_calls.put(partial(self._screen.add_event, event))
                if not self._is_over.is_set():
                    self._show_notice("the server has ended; trying to reconnect")
            except ControlError as error:
                self._show_notice(f"{error}; trying to reconnect")
            self._is_over.wait(_RETRY_S)
