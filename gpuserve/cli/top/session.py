"""``gpuserve top`` at a terminal: events, keys and outcomes reach one loop, which draws. What is shown, and
what a key means, is in ``screen.py``.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live

from gpuserve.cli.console.keys import Terminal
from gpuserve.cli.top.screen import QUIT, KeyCommand, Screen
from gpuserve.core.errors import ControlError
from gpuserve.core.event_log import EventKind
from gpuserve.follow.stream import EventStream, chosen_kinds
from gpuserve.supervisor.control.operator_client import ask

#: A server that is gone is looked for again so often.
_RETRY_S: Final = 1.0
#: So long a thread waits for an event before it looks whether it is to end.
_LOOK_S: Final = 0.5
#: What a terminal sends for one key.
_KEY: Final = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_SAMPLE: Final = frozenset({EventKind.SAMPLE})


def first_sample(server: str | None) -> dict[str, Any]:
    """Return the first sample of a server that has rates. ControlError: there is none, or it ended."""
    with EventStream(server, _SAMPLE) as stream:
        stream.next()  # what is counted from here on
        sample = stream.next()
    if sample is None:
        raise ControlError("the server has ended")
    return sample


class TopSession:
    """One ``gpuserve top``, from ``run()`` until its user has enough. The server may end and come back."""

    def __init__(self, server: str | None, screen: Screen, console: Console, terminal: Terminal) -> None:
        self._server = server
        self._screen = screen
        self._console = console
        self._terminal = terminal
        #: What is to be done in the loop, by whoever found it out.
        self._todo: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._is_over = threading.Event()

    def run(self) -> None:
        """Draw until ``q`` or Ctrl-C. In the main thread, whose signals it takes meanwhile."""
        threads = [
            threading.Thread(target=one, name=f"gpuserve-top-{name}", daemon=True)
            for name, one in (("events", self._follow), ("keys", self._read_keys))
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
            self._todo.get()()
            while not self._todo.empty():  # what is there together is drawn once
                self._todo.get()()
            self._draw()

    def _draw(self) -> None:
        size = self._console.size
        self._live.update(Group(*self._screen.lines(size.width, size.height)), refresh=True)

    # ---- signals --------------------------------------------------------------------------

    @contextmanager
    def _signals(self) -> Iterator[None]:
        wanted = {signal.SIGWINCH: lambda: None, signal.SIGTSTP: self._pause, signal.SIGTERM: self._end}
        before = {
            number: signal.signal(number, partial(self._later, what)) for number, what in wanted.items()
        }
        try:
            yield
        finally:
            for number, one in before.items():
                signal.signal(number, one)

    def _later(self, what: Callable[[], object], *_: object) -> None:
        self._todo.put(what)

    def _pause(self) -> None:
        """Give the terminal back, and stop until the shell lets this go on."""
        self._live.stop()
        self._terminal.put_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._terminal.look_again()
        self._live.start()

    def _end(self) -> None:
        self._is_over.set()

    # ---- keys -----------------------------------------------------------------------------

    def _read_keys(self) -> None:
        while (typed := self._terminal.read()) is not None:
            for key in _KEY.findall(typed):
                self._todo.put(partial(self._press, key))
        self._todo.put(self._end)

    def _press(self, key: str) -> None:
        command = self._screen.pressed(key)
        if command is QUIT:
            self._end()
        elif command is not None:
            threading.Thread(target=self._ask, args=(command,), daemon=True).start()

    def _ask(self, command: KeyCommand) -> None:
        try:
            outcome = ask(self._server, command.verb, command.arguments, self._tell)
        except ControlError as error:
            self._tell(str(error))
        else:
            self._tell(outcome.text or f"done: {command.question}")

    def _tell(self, text: str) -> None:
        self._todo.put(partial(setattr, self._screen, "notice", text))

    # ---- events ---------------------------------------------------------------------------

    def _follow(self) -> None:
        kinds = chosen_kinds(()) | _SAMPLE
        while not self._is_over.is_set():
            try:
                with EventStream(self._server, kinds, past=True) as stream:
                    self._tell("")
                    self._pass_on(stream)
                if not self._is_over.is_set():
                    self._tell("the server has ended; looking for it again")
            except ControlError as error:
                self._tell(f"{error}; looking for it again")
            self._is_over.wait(_RETRY_S)

    def _pass_on(self, stream: EventStream) -> None:
        while not (stream.is_over or self._is_over.is_set()):
            event = stream.next(_LOOK_S)
            if event is not None:
                self._todo.put(partial(self._screen.heard, event))


def show_once(sample: dict[str, Any], screen: Screen, console: Console) -> None:
    """Print the whole list of models as it is at this moment."""
    screen.heard(sample)
    for line in screen.report(console.width):
        console.print(line, no_wrap=True, crop=False)
