"""Quiescence: an operator takes the server out of service, waits for its requests, and puts it back."""

from __future__ import annotations

import enum
import itertools
import logging
import os
import time
from typing import Final, NamedTuple

from gpuserve.config.settings.server import TERMINATED_LAME_DUCK_S
from gpuserve.core.errors import Code
from gpuserve.core.event_log import EventKind
from gpuserve.core.states import StepTable
from gpuserve.supervisor.control.front_messages import Quiesce, Quiesced, Resume
from gpuserve.supervisor.control.operator_protocol import OnOutcome, OnProgress, VerbOutcome
from gpuserve.supervisor.processes.front_monitor import ANSWER_TIMEOUT_S
from gpuserve.supervisor.processes.server_core import ServerCore

logger = logging.getLogger(__name__)

#: The ticket of a ``Quiesce`` to which nobody waits for an answer.
_NO_TICKET: Final = 0


class QuiescenceState(enum.Enum):
    """The service states of the server."""

    IN_SERVICE = "IN_SERVICE"
    LEAVING = "LEAVING"
    OUT_OF_SERVICE = "OUT_OF_SERVICE"


QUIESCENCE_STEPS: Final = StepTable(
    "the service of the server",
    {
        QuiescenceState.IN_SERVICE: {QuiescenceState.LEAVING},
        QuiescenceState.LEAVING: {QuiescenceState.OUT_OF_SERVICE, QuiescenceState.IN_SERVICE},
        QuiescenceState.OUT_OF_SERVICE: {QuiescenceState.LEAVING, QuiescenceState.IN_SERVICE},
    },
)


class _Drain(NamedTuple):
    """A running drain: the end of its lame duck period, and the time that it may take from then on."""

    answer: OnOutcome
    lame_until: float
    timeout_s: float


class Quiescence:
    """The service state of one server: drains, and the return to service."""

    def __init__(self, core: ServerCore) -> None:
        self.state = QuiescenceState.IN_SERVICE
        self._core = core
        self._left_at = 0.0
        self._tickets = itertools.count(_NO_TICKET + 1)
        self._drains: dict[int, _Drain] = {}

    def lame_duck_s(self, *, terminated: bool = False) -> float:
        """Return the length of the lame duck period; unless set, only a platform's SIGTERM has one."""
        if (lame_duck_s := self._core.settings.current.lame_duck_s) is not None:
            return lame_duck_s
        # If the process has a terminal, the SIGTERM may come from a person. With inherited listeners, new
        # connections wait for the next server.
        is_platforms = terminated and not (os.isatty(0) or os.isatty(2) or self._core.listeners.are_inherited)
        return TERMINATED_LAME_DUCK_S if is_platforms else 0.0

    def lame_duck_left_s(self, lame_duck_s: float) -> float:
        """Return the rest of a lame duck period, which may have begun with an earlier drain."""
        if self.state is QuiescenceState.IN_SERVICE:
            return lame_duck_s
        return max(0.0, self._left_at + lame_duck_s - time.monotonic())

    def announce(self) -> None:
        """Tell a new front, before it may be ready. Requests of the earlier front are lost."""
        if self.state is QuiescenceState.IN_SERVICE:
            return
        self._core.front.send(Quiesce(_NO_TICKET, 0.0, 0.0))
        for ticket, drain in self._drains.items():
            lame_duck_s = max(0.0, drain.lame_until - time.monotonic())
            self._core.front.send(Quiesce(ticket, drain.timeout_s, lame_duck_s))

    def drain(self, timeout_s: float | None, progress: OnProgress, answer: OnOutcome) -> None:
        """Take the server out of service. Answer when no request waits or runs, or ``timeout_s`` (by default
        ``drain_timeout_s``) after the lame duck period.
        """
        lame_duck_s = self.lame_duck_left_s(self.lame_duck_s())
        if self.state is QuiescenceState.IN_SERVICE:
            self._left_at = time.monotonic()
        timeout_s = self._core.settings.current.drain_timeout_s if timeout_s is None else timeout_s
        ticket = next(self._tickets)
        self._drains[ticket] = _Drain(answer, time.monotonic() + lame_duck_s, timeout_s)
        if self.state is not QuiescenceState.LEAVING:
            self._move(QuiescenceState.LEAVING)
        later = f"; connections are told to go in {lame_duck_s:.3g} s" if lame_duck_s else ""
        logger.info("out of service%s", later)
        progress(f"not ready from now on{later}")
        self._core.front.send(Quiesce(ticket, timeout_s, lame_duck_s))
        late = VerbOutcome(Code.DEADLINE_EXCEEDED.value, "the front process has not said that it is drained")
        delay_s = lame_duck_s + timeout_s + ANSWER_TIMEOUT_S
        self._core.reactor.call_later(delay_s, lambda: self._answer(ticket, late))

    def on_quiesced(self, message: Quiesced) -> None:
        if (drain := self._drains.get(message.ticket)) is None:
            return
        outcome = VerbOutcome("", "out of service; nothing waits or runs", {"unfinished": 0})
        if (count := message.unfinished) or not message.is_quiet:
            what = "1 request is not finished" if count == 1 else f"{count} requests are not finished"
            time_s = f"{drain.timeout_s:g} s"
            how = f"{what} within {time_s}" if count else f"requests still come after {time_s}"
            text = f"{how}; the server stays out of service"
            outcome = VerbOutcome(Code.DEADLINE_EXCEEDED.value, text, {"unfinished": count})
        self._answer(message.ticket, outcome)

    def resume(self, answer: OnOutcome) -> None:
        """Put the server back into service, and answer running drains with CANCELLED."""
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
        if (drain := self._drains.pop(ticket, None)) is not None:
            drain.answer(outcome)
            if not self._drains:
                self._move(QuiescenceState.OUT_OF_SERVICE, outcome.result.get("unfinished"))

    def _move(self, state: QuiescenceState, unfinished: int | None = None) -> None:
        self.state = QUIESCENCE_STEPS.step(self.state, state)
        self._core.events.record(EventKind.DRAINED, service=state.value, unfinished=unfinished)
