"""The end of a server in its order: drain the front, end it, let the workers finish, and go.

What made the server end is not known here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final

from gpuserve.errors import StartupError
from gpuserve.settings import ServerSettings
from gpuserve.supervisor.attached_models import AttachedModels
from gpuserve.supervisor.front_keeper import FrontKeeper
from gpuserve.supervisor.listeners import Listeners
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.served_models import ServedModels
from gpuserve.supervisor.server_state import ServerLife, ServerState

logger = logging.getLogger(__name__)

#: After its Stop a worker may finish its batch this long, then it is killed.
WORKER_STOP_TIMEOUT_S: Final = 10.0
HURRIED_STOP_TIMEOUT_S: Final = 1.0
#: After its Quit a front may close its connections this long, then it is killed. Longer than the
#: front's own patience with them.
FRONT_QUIT_TIMEOUT_S: Final = 6.0


class Ending:
    """One end. ``settings`` gives them as they are when it begins, and ``lame_duck_left_s`` how much of the
    lame duck is still to be had then; the reactor stops when all is done.
    """

    def __init__(
        self,
        life: ServerLife,
        reactor: Reactor,
        settings: Callable[[], ServerSettings],
        listeners: Listeners,
        front: FrontKeeper,
        attached: AttachedModels,
        models: ServedModels,
        lame_duck_left_s: Callable[[], float],
    ) -> None:
        self._life = life
        self._reactor = reactor
        self._settings = settings
        self._listeners = listeners
        self._front = front
        self._attached = attached
        self._models = models
        self._lame_duck_left_s = lame_duck_left_s
        #: Requests that the front had to give up when it drained.
        self._unfinished = 0

    def begin_drain(self, timeout_s: float = math.inf, *, lame: bool = True) -> None:
        """Finish what is queued, as far as that is possible; without ``lame`` nothing new is taken."""
        if self._life.state is ServerState.STARTING:
            self.now()
        elif self._life.state is ServerState.SERVING:
            self._life.move(ServerState.DRAINING)
            self._attached.take_no_more()
            self._models.abandon(ended())
            lame_duck_s = self._lame_duck_left_s() if lame else 0.0
            if lame_duck_s:
                served = f"requests are served for {lame_duck_s:.3g} s more"
                logger.info("stopping: %s, then what is queued is finished", served)
            else:
                logger.info("stopping: finishing what is queued")
            if self._front.process is None:  # between two fronts nothing is in flight
                self.begin_stop()
                return
            timeout_s = min(timeout_s, self._settings().drain_timeout_s)
            notice = lame and self._settings().lame_duck_s > 0
            self._front.drain(timeout_s, lame_duck_s, notice=notice)
            self._reactor.call_later(lame_duck_s + timeout_s + 1.0, self.begin_stop)

    def front_drained(self, unfinished: int) -> None:
        """Nothing is in flight: the processes can go."""
        self._unfinished = unfinished
        if unfinished:
            logger.warning("%d requests were not finished within the drain time", unfinished)
        self.begin_stop()

    def begin_stop(self) -> None:
        """The front goes first."""
        if self._life.state is not ServerState.DRAINING:
            return
        self._life.move(ServerState.STOPPING)
        front = self._front
        front.quit()
        # The front closes its own: who comes now finds nobody, and is not left waiting.
        self._listeners.close()
        if front.process is None:
            self.stop_workers()
            return
        self._reactor.call_later(FRONT_QUIT_TIMEOUT_S, front.kill)

    def stop_workers(self) -> None:
        """The front has closed its connections; the workers are next."""
        self._attached.end()
        self._models.stop()
        # What outlived the drain has nobody to answer to.
        timeout_s = HURRIED_STOP_TIMEOUT_S if self._unfinished else WORKER_STOP_TIMEOUT_S
        self._reactor.call_later(timeout_s, self.now)
        self.check_workers_stopped()

    def check_workers_stopped(self) -> None:
        """The last worker that stops is the end."""
        if self._models.all_stopped():
            self.now()

    def now(self) -> None:
        """Whatever still runs is not waited for."""
        self._reactor.stop()


def ended() -> StartupError:
    """What is told to whoever wanted something from a server that ends."""
    return StartupError("the server has been stopped")
