"""Whether the server is in service: an operator takes it out, lets it finish what it has, and puts it back.
Out of service is not ready; whatever comes is still served.
"""

from __future__ import annotations

import enum
import itertools
import logging
import os
import time
from typing import Final, NamedTuple

from gpuserve.config.settings.server import TERMINATED_LAME_DUCK_S
from gpuserve.control.messages import Quiesce, Quiesced, Resume
from gpuserve.control.operator import AnswerOutcome, Tell, VerbOutcome
from gpuserve.errors import Code
from gpuserve.journal.kinds import EventKind
from gpuserve.states import StepTable
from gpuserve.supervisor.core.front_keeper import ANSWER_TIMEOUT_S
from gpuserve.supervisor.core.server_core import ServerCore

logger = logging.getLogger(__name__)

#: Of what a front is told that nobody waits for.
_NO_TICKET: Final = 0


class QuiescenceState(enum.Enum):
    """Whether the server is in service."""

    IN_SERVICE = "IN_SERVICE"
    LEAVING = "LEAVING"
    OUT_OF_SERVICE = "OUT_OF_SERVICE"


STEPS: Final = StepTable(
    "the service of the server",
    {
        QuiescenceState.IN_SERVICE: {QuiescenceState.LEAVING},
        QuiescenceState.LEAVING: {QuiescenceState.OUT_OF_SERVICE, QuiescenceState.IN_SERVICE},
        QuiescenceState.OUT_OF_SERVICE: {QuiescenceState.LEAVING, QuiescenceState.IN_SERVICE},
    },
)


class _Drain(NamedTuple):
    """A drain that is waited for: when its lame duck ends, and how long it may take from then on."""

    answer: AnswerOutcome
    lame_until: float
    timeout_s: float


class Quiescence:
    """The service of one server: drains, and the return from them."""

    def __init__(self, core: ServerCore) -> None:
        self.state = QuiescenceState.IN_SERVICE
        self._core = core
        self._left_at = 0.0
        self._tickets = itertools.count(_NO_TICKET + 1)
        self._drains: dict[int, _Drain] = {}

    def lame_duck_s(self, *, terminated: bool = False) -> float:
        """The whole lame duck; where it is not said, only what a platform ends by SIGTERM has one."""
        if (said := self._core.settings.now.lame_duck_s) is not None:
            return said
        return TERMINATED_LAME_DUCK_S if terminated and not _has_terminal() else 0.0

    def lame_duck_left_s(self, lame_duck_s: float) -> float:
        """Return what is left of a lame duck to a server that is leaving, or leaves now."""
        if self.state is QuiescenceState.IN_SERVICE:
            return lame_duck_s
        return max(0.0, self._left_at + lame_duck_s - time.monotonic())

    def announce(self) -> None:
        """Tell a new front, before it may be ready. What the one before it had is lost with it."""
        if self.state is QuiescenceState.IN_SERVICE:
            return
        self._core.front.send(Quiesce(_NO_TICKET, 0.0, 0.0))
        for ticket, drain in self._drains.items():
            lame_duck_s = max(0.0, drain.lame_until - time.monotonic())
            self._core.front.send(Quiesce(ticket, drain.timeout_s, lame_duck_s))

    def drain(self, timeout_s: float | None, tell: Tell, answer: AnswerOutcome) -> None:
        """Go out of service; answered when no request waits or runs, or ``timeout_s`` after the lame duck.
        ``timeout_s`` None is the drain time of the settings.
        """
        lame_duck_s = self.lame_duck_left_s(self.lame_duck_s())
        if self.state is QuiescenceState.IN_SERVICE:
            self._left_at = time.monotonic()
        timeout_s = self._core.settings.now.drain_timeout_s if timeout_s is None else timeout_s
        ticket = next(self._tickets)
        self._drains[ticket] = _Drain(answer, time.monotonic() + lame_duck_s, timeout_s)
        if self.state is not QuiescenceState.LEAVING:
            self._move(QuiescenceState.LEAVING)
        later = f"; connections are told to go in {lame_duck_s:.3g} s" if lame_duck_s else ""
        logger.info("out of service%s", later)
        tell(f"not ready from now on{later}")
        self._core.front.send(Quiesce(ticket, timeout_s, lame_duck_s))
        late = VerbOutcome(Code.DEADLINE_EXCEEDED.value, "the front process has not said that it is drained")
        delay_s = lame_duck_s + timeout_s + ANSWER_TIMEOUT_S
        self._core.reactor.call_later(delay_s, lambda: self._answer(ticket, late))

    def quiesced(self, said: Quiesced) -> None:
        if (drain := self._drains.get(said.ticket)) is None:
            return
        outcome = VerbOutcome("", "out of service; nothing waits or runs", {"unfinished": 0})
        if said.unfinished or not said.is_quiet:
            outcome = _unfinished(said.unfinished, drain.timeout_s)
        self._answer(said.ticket, outcome)

    def resume(self, answer: AnswerOutcome) -> None:
        """Go into service again; whoever waits for a drain is told so."""
        if self.state is QuiescenceState.IN_SERVICE:
            answer(VerbOutcome("", "in service already", {}))
            return
        self._move(QuiescenceState.IN_SERVICE)
        logger.info("in service again")
        self._core.front.send(Resume())
        drains, self._drains = self._drains, {}
        for drain in drains.values():
            drain.answer(VerbOutcome(Code.CANCELLED.value, "the drain was undone", {}))
        answer(VerbOutcome("", "in service again", {}))

    def _answer(self, ticket: int, outcome: VerbOutcome) -> None:
        drain = self._drains.pop(ticket, None)
        if drain is not None:
            drain.answer(outcome)
            if not self._drains:
                self._move(QuiescenceState.OUT_OF_SERVICE, outcome.result.get("unfinished"))

    def _move(self, state: QuiescenceState, unfinished: int | None = None) -> None:
        self.state = STEPS.step(self.state, state)
        self._core.events.tell(EventKind.DRAINED, service=state.value, unfinished=unfinished)


def _has_terminal() -> bool:
    """Whether somebody sits at a terminal and waits; SIGTERM is then a person's as well."""
    return os.isatty(0) or os.isatty(2)


def _unfinished(count: int, timeout_s: float) -> VerbOutcome:
    what = "1 request is not finished" if count == 1 else f"{count} requests are not finished"
    how = f"{what} within {timeout_s:g} s" if count else f"requests still come after {timeout_s:g} s"
    text = f"{how}; the server stays out of service"
    return VerbOutcome(Code.DEADLINE_EXCEEDED.value, text, {"unfinished": count})
