"""The end of a server in its order: drain the front, end it, let the workers finish, and go."""

from __future__ import annotations

import logging
import math
from typing import Final

from gpuserve.control import messages
from gpuserve.errors import StartupError
from gpuserve.journal.kinds import EventKind
from gpuserve.supervisor.attach.attached_models import AttachedModels
from gpuserve.supervisor.core.ingress import IngressProcesses
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.core.server_life import ServerState
from gpuserve.supervisor.models.served_models import ServedModels
from gpuserve.supervisor.operator.quiescence import Quiescence, QuiescenceState
from gpuserve.supervisor.workers.worker_group import stop_timeout_s

logger = logging.getLogger(__name__)

#: After its Quit a front may close its connections this long, then it is killed. Longer than the
#: front's own patience with them.
FRONT_QUIT_TIMEOUT_S: Final = 6.0


class ServerEnding:
    """The end of one server. The reactor stops when all is done."""

    def __init__(
        self,
        core: ServerCore,
        models: ServedModels,
        attached: AttachedModels,
        quiescence: Quiescence,
        ingress: IngressProcesses,
    ) -> None:
        self._core = core
        self._models = models
        self._attached = attached
        self._quiescence = quiescence
        self._ingress = ingress
        #: Requests that the front had to give up when it drained.
        self._unfinished = 0

    def begin_drain(
        self, timeout_s: float = math.inf, *, lame: bool = True, terminated: bool = False
    ) -> None:
        """Finish what is queued, as far as that is possible; without ``lame`` nothing new is taken.
        ``terminated``: a SIGTERM ends the server.
        """
        core = self._core
        if core.life.state is ServerState.STARTING:
            self.now()
        elif core.life.state is ServerState.SERVING:
            core.life.move(ServerState.DRAINING)
            self._attached.take_no_more()
            self._models.abandon(ended())
            whole_s = self._quiescence.lame_duck_s(terminated=terminated) if lame else 0.0
            lame_duck_s = self._quiescence.lame_duck_left_s(whole_s)
            if lame_duck_s:
                served = f"requests are served for {lame_duck_s:.3g} s more"
                logger.info("stopping: %s, then what is queued is finished", served)
            else:
                logger.info("stopping: finishing what is queued")
            if core.front.process is None:  # between two fronts nothing is in flight
                self.begin_stop()
                return
            timeout_s = min(timeout_s, core.settings.now.drain_timeout_s)
            core.front.send(messages.Drain(timeout_s, lame_duck_s, whole_s > 0))
            core.reactor.call_later(lame_duck_s + timeout_s + 1.0, self.begin_stop)

    def front_drained(self, unfinished: int) -> None:
        """Go on with the end, because nothing is in flight any more."""
        self._unfinished = unfinished
        out = QuiescenceState.OUT_OF_SERVICE.value
        self._core.events.tell(EventKind.DRAINED, service=out, unfinished=unfinished)
        if unfinished:
            logger.warning("%d requests were not finished within the drain time", unfinished)
        self.begin_stop()

    def begin_stop(self) -> None:
        if self._core.life.state is not ServerState.DRAINING:
            return
        self._core.life.move(ServerState.STOPPING)
        front = self._core.front
        front.quit()
        # The front closes its own: who comes now finds nobody, and is not left waiting.
        self._core.listeners.close()
        if front.process is None:
            self.front_ended()
            return
        self._core.reactor.call_later(FRONT_QUIT_TIMEOUT_S, front.kill)

    def front_ended(self) -> None:
        """Stop the workers, because the front has closed its connections."""
        self._ingress.close()  # those that are left of a front that was killed
        self._attached.end()
        self._models.stop()
        # What outlived the drain has nobody to answer to.
        self._core.reactor.call_later(stop_timeout_s(hurried=self._unfinished > 0), self.now)
        self.check_workers_stopped()

    def check_workers_stopped(self) -> None:
        if self._models.table.all_stopped():
            self.now()

    def now(self) -> None:
        self._core.reactor.stop()


def ended() -> StartupError:
    return StartupError("the server has been stopped")
