"""What is published, and when: events as they happen, lines of the log and samples while somebody wants them.
ZeroMQ is imported beside the server, once it has started or somebody asks, so that a start is as quick as
without it.
"""

from __future__ import annotations

import enum
import itertools
import json
import logging
import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from gpuserve.control.messages import Rates, WatchRates
from gpuserve.journal.event import Event
from gpuserve.journal.kinds import EventKind
from gpuserve.journal.topics import topic
from gpuserve.states import StepTable
from gpuserve.supervisor.core.log_lines import LogLine
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.publication.publisher import Publisher
from gpuserve.supervisor.publication.samples import sample

logger = logging.getLogger(__name__)

#: So long after a server has started it begins to publish by itself.
DELAY_S: Final = 1.0

#: Makes a call beside the reactor, and gives the result to another in it.
RunBeside: TypeAlias = Callable[[Callable[[], str], Callable[[str | Exception], None]], None]


class PublicationState(enum.Enum):
    """Whether subscribers are taken."""

    CLOSED = "CLOSED"
    OPENING = "OPENING"
    OPEN = "OPEN"
    FAILED = "FAILED"


STEPS: Final = StepTable(
    "the publication",
    {
        PublicationState.CLOSED: {PublicationState.OPENING},
        PublicationState.OPENING: {PublicationState.OPEN, PublicationState.FAILED},
        PublicationState.FAILED: {PublicationState.OPENING},
    },
)


class Publication:
    """The published stream of one server. Owner of its socket, until ``close()``."""

    def __init__(self, core: ServerCore, run_beside: RunBeside) -> None:
        self._core = core
        self._run_beside = run_beside
        self._publisher = Publisher(core.reactor, self._on_subscriptions)
        self._state = PublicationState.CLOSED
        self._waiting: list[Callable[[], None]] = []
        self._samples = False
        self._numbers = itertools.count(1)
        core.events.recent.follow(self._on_event)
        core.lines.follower = self._on_line

    @property
    def address(self) -> str:
        """Where to subscribe; "" where nobody can."""
        return self._publisher.address

    def open_later(self) -> None:
        """Take subscribers soon: a start has something better to do."""
        self._core.reactor.call_later(DELAY_S, lambda: self.open(lambda: None))

    def open(self, then: Callable[[], None]) -> None:
        """Take subscribers from now on; ``then`` is called when they are taken, or cannot be."""
        if self._state is PublicationState.OPEN:
            then()
            return
        self._waiting.append(then)
        if self._state is not PublicationState.OPENING:
            self._move(PublicationState.OPENING)
            self._run_beside(_why_not_imported, self._on_imported)

    def close(self) -> None:
        self._publisher.close()

    def front_ready(self) -> None:
        """Tell a new front whether somebody wants samples."""
        if self._samples:
            self._core.front.send(WatchRates(True))

    def sample(self, status: dict[str, Any], rates: Rates) -> None:
        """Publish how the server is, by its status and the rates of the same moment."""
        number = next(self._numbers)
        self._publish(topic(EventKind.SAMPLE), lambda: sample(status, rates, number, time.time()))

    def _on_imported(self, imported: str | Exception) -> None:
        why_not = str(imported)
        try:
            if not why_not:
                self._publisher.open()
        except OSError as error:
            why_not = error.strerror or str(error)
        if why_not:
            logger.warning("nobody can subscribe to the events of this server: %s", why_not)
        self._move(PublicationState.FAILED if why_not else PublicationState.OPEN)
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def _on_subscriptions(self) -> None:
        wanted = self._publisher.subscriptions.wants_some(EventKind.SAMPLE)
        if wanted != self._samples:
            self._samples = wanted
            self._core.front.send(WatchRates(wanted))

    def _on_event(self, event: Event) -> None:
        self._publish(topic(event.kind, event.model), event.document)

    def _on_line(self, line: LogLine) -> None:
        self._publish(topic(EventKind.LOG, line.model), line.document)

    def _publish(self, of: bytes, document: Callable[[], dict[str, Any]]) -> None:
        if self._publisher.subscriptions.wants(of):
            text = json.dumps(document(), separators=(",", ":"), default=str)
            self._publisher.publish(of, text.encode())

    def _move(self, state: PublicationState) -> None:
        self._state = STEPS.step(self._state, state)


def _why_not_imported() -> str:
    """Import what publishing needs, in any thread, and say why that cannot be; "" where it can."""
    try:
        import zmq  # noqa: F401
    except (ImportError, OSError) as error:
        return str(error)
    return ""
