"""Calls that may take their time, in threads beside the reactor's: files on a slow disk, models that are
asked what they are. The supervisor goes on meanwhile: it starts workers again, and obeys signals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gpuserve.errors import GpuserveError
from gpuserve.supervisor.core.refusals import refuse_change
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.core.server_life import ServerState

_Result = TypeVar("_Result")


class Background:
    """The threads of one server. A call whose server has ended meanwhile has no result."""

    def __init__(self, core: ServerCore) -> None:
        self._core = core

    def run(self, call: Callable[[], _Result], then: Callable[[_Result | GpuserveError], None]) -> None:
        """Give ``then`` the result of the call in the reactor's thread, or the error by which the change that
        needs it is refused: what the call raised, or why no thread could be started.
        """
        arguments = (call, then)
        try:
            threading.Thread(
                target=self._run, args=arguments, name="gpuserve-background", daemon=True
            ).start()
        except (RuntimeError, MemoryError) as error:
            self._core.reactor.call_later(0.0, partial(self._give, then, refuse_change("the change", error)))

    def _run(self, call: Callable[[], _Result], then: Callable[[_Result | GpuserveError], None]) -> None:
        result: _Result | GpuserveError
        try:
            result = call()
        except GpuserveError as error:
            result = error
        except Exception as error:
            result = refuse_change("the change", error)
        self._core.reactor.call_soon_threadsafe(partial(self._give, then, result))

    def _give(self, then: Callable[[_Result | GpuserveError], None], result: _Result | GpuserveError) -> None:
        if self._core.life.state is not ServerState.STOPPED:
            then(result)
