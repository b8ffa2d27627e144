"""Watches one load: says now and then that it still goes on, and where it stands; ends it at its limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from gpuserve.config.settings.logs import log_with_text
from gpuserve.control.reactor import Reactor
from gpuserve.supervisor.core.kept_child import KeptChild
from gpuserve.supervisor.core.stack_text import place_of_user

logger = logging.getLogger(__name__)

#: A load is told of so often, but three times within its limit at least.
TELL_S: Final = 10.0
_TELL_PART: Final = 3


class SlowLoad(NamedTuple):
    """A load that goes on: since when, its phase, and where the user's code stands ("" where none does)."""

    loading_s: float
    phase: str
    place: str


#: Hears of a load that still goes on.
OnSlow: TypeAlias = Callable[[SlowLoad], None]


class LoadWatch:
    """The load of one worker, until ``end()``. ``timeout_s`` 0 is no limit. ``verdict`` says that it was
    ended here, "" where it was not.
    """

    def __init__(
        self,
        child: KeptChild,
        reactor: Reactor,
        timeout_s: float,
        fields: dict[str, str],
        on_slow: OnSlow,
    ) -> None:
        self.phase = "starting"
        self.verdict = ""
        self._child = child
        self._reactor = reactor
        self._timeout_s = timeout_s
        self._fields = fields
        self._on_slow = on_slow
        self._began_at = time.monotonic()
        self._is_over = False

    def begin(self) -> None:
        self._look_later()
        if self._timeout_s > 0:
            self._reactor.call_later(self._timeout_s, self._on_timeout)

    def end(self) -> None:
        self._is_over = True

    def _look_later(self) -> None:
        self._reactor.call_later(min(TELL_S, self._timeout_s / _TELL_PART or TELL_S), self._look)

    def _look(self) -> None:
        if not self._is_over:
            self._child.stacks.ask(self._tell)
            self._look_later()

    def _tell(self, stacks: str) -> None:
        if self._is_over:
            return
        slow = SlowLoad(time.monotonic() - self._began_at, self.phase, place_of_user(stacks))
        where = f", at {slow.place}" if slow.place else ""
        limit = f"; it is ended after {self._timeout_s:g} s (load_timeout_s)" if self._timeout_s else ""
        text = f"still {slow.phase} after {slow.loading_s:.1f} s{where}{limit}"
        logger.info("%s", text, extra=self._fields)
        self._on_slow(slow)

    def _on_timeout(self) -> None:
        if not self._is_over:
            self._child.stacks.ask(self._end_late, is_ending=True)

    def _end_late(self, stacks: str) -> None:
        if self._is_over:
            return
        self.verdict = f"not loaded within {self._timeout_s:g} s"
        log_with_text(logger, logging.ERROR, f"{self.verdict} (load_timeout_s)", stacks, self._fields)
        self._child.process.kill()
