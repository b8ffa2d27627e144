"""The server that follows the files of its models: it looks at them every so often, in the
background, and has what has changed reloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from gpuserve.settings.server import POLL
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.core.server_life import ServerState
from gpuserve.supervisor.models.repository import ConfigSource
from gpuserve.supervisor.reload.background import Background
from gpuserve.supervisor.reload.looks import Looks, Stamps

logger = logging.getLogger(__name__)

#: A change is looked at again after this time, or the time between looks where that is less.
SETTLE_S: Final = 1.0


class FilePolling:
    """The looks of one server; without a ``source`` there is nothing to look at. ``begin`` is told the models
    whose files have changed.
    """

    def __init__(
        self,
        source: ConfigSource | None,
        core: ServerCore,
        background: Background,
        begin: Callable[[Collection[str]], None],
    ) -> None:
        self._source = source
        self._background = background
        self._core = core
        self._begin = begin
        self._looks = None if source is None else Looks(source.start_stamps)
        #: Which of the timers that were set is the one that counts.
        self._timer = 0
        #: What kept the last look from seeing anything, which is told once.
        self._trouble = ""

    def set_timer(self) -> None:
        """Look again when it is time by the settings of now; in place of what was to be looked at before."""
        self._set(self._core.settings.now.repository_poll_s)

    def _set(self, delay_s: float) -> None:
        self._timer += 1
        now = self._core.settings.now
        if self._source is not None and now.model_control == POLL and now.repository_poll_s > 0:
            self._core.reactor.call_later(delay_s, partial(self._look, self._timer))

    def _look(self, timer: int) -> None:
        if timer == self._timer and self._core.life.state is ServerState.SERVING:
            self._background.run(self._read, partial(self._seen, timer))

    def _read(self) -> tuple[Stamps, str]:
        """What the files are now, or what keeps them from being looked at."""
        assert self._source is not None
        try:
            return self._source.stamps(), ""
        except OSError as error:
            return {}, str(error)

    def _seen(self, timer: int, read: tuple[Stamps, str]) -> None:
        stamps, trouble = read
        if timer != self._timer or self._core.life.state is not ServerState.SERVING:
            return
        if trouble and trouble != self._trouble:
            logger.error("the files of the models cannot be looked at, and nothing is changed: %s", trouble)
        self._trouble = trouble
        if trouble or self._looks is None:
            self.set_timer()
            return
        look = self._looks.look(stamps)
        interval_s = self._core.settings.now.repository_poll_s
        self._set(min(SETTLE_S, interval_s) if look.is_moving else interval_s)
        if look.changed:
            self._begin(look.changed)
