"""Calls that may take their time, in threads beside the reactor's: files on a slow disk, models that are
asked what they are. The supervisor goes on meanwhile: it starts workers again, and obeys signals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.core.server_life import ServerState

_Result = TypeVar("_Result")


class Background:
    """The threads of one server. A call whose server has ended meanwhile has no result."""

    def __init__(self, core: ServerCore) -> None:
        self._core = core

    def run(self, call: Callable[[], _Result], then: Callable[[_Result], None]) -> None:
        """Give ``then`` the result in the reactor's thread. What the call raises is raised there."""
        arguments = (call, then)
        threading.Thread(target=self._run, args=arguments, name="gpuserve-background", daemon=True).start()

    def _run(self, call: Callable[[], _Result], then: Callable[[_Result], None]) -> None:
        try:
            result = call()
        except Exception as error:
            self._core.reactor.call_soon_threadsafe(partial(_fail, error))
        else:
            self._core.reactor.call_soon_threadsafe(partial(self._give, then, result))

    def _give(self, then: Callable[[_Result], None], result: _Result) -> None:
        if self._core.life.state is not ServerState.STOPPED:
            then(result)


def _fail(error: Exception) -> None:
    raise error
