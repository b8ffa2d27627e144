"""Shutdown of a server in four steps: drain the front, quit the front, stop the workers, stop the reactor."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final

from gpuserve.core.errors import StartupError
from gpuserve.core.event_log import EventKind
from gpuserve.supervisor.attach.attached_programs import AttachedModels
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.models.served_models import ServedModels
from gpuserve.supervisor.operator.quiescence import Quiescence, QuiescenceState
from gpuserve.supervisor.processes.ingress_processes import IngressProcesses
from gpuserve.supervisor.processes.lifecycle import ServerState
from gpuserve.supervisor.processes.server_core import ServerCore
from gpuserve.supervisor.workers.worker_monitor import stop_timeout_s

logger = logging.getLogger(__name__)

#: Time for a front to close its connections after ``Quit``; then it is killed. Longer than the front's own
#: timeout for its connections.
FRONT_QUIT_TIMEOUT_S: Final = 6.0


@dataclass(eq=False)
class ServerShutdown:
    """The shutdown of one server. The reactor stops at its end."""

    _core: ServerCore
    _models: ServedModels
    _attached: AttachedModels
    _quiescence: Quiescence
    _ingress: IngressProcesses
    #: Requests that the front aborted at the end of the drain.
    _unfinished: int = 0

    def start_drain(
        self, timeout_s: float = math.inf, *, lame: bool = True, terminated: bool = False
    ) -> None:
        """Finish queued requests within ``timeout_s``. Without ``lame`` no new request is accepted; otherwise
        the lame duck period comes first. ``terminated``: a SIGTERM ends the server.
        """
        core = self._core
        if core.lifecycle.state is ServerState.STARTING:
            self.now()
        elif core.lifecycle.state is ServerState.SERVING:
            core.lifecycle.move(ServerState.DRAINING)
            self._attached.stop_accepting()
            self._models.abandon(ended())
            whole_s = self._quiescence.lame_duck_s(terminated=terminated) if lame else 0.0
            lame_duck_s = self._quiescence.lame_duck_left_s(whole_s)
            if lame_duck_s:
                text = "stopping: requests are served for %.3g s more, then queued requests are finished"
                logger.info(text, lame_duck_s)
            else:
                logger.info("stopping: finishing queued requests")
            if core.front.process is None:  # no request is in flight between two fronts
                self.start_stop()
                return
            timeout_s = min(timeout_s, core.settings.current.drain_timeout_s)
            core.front.send(messages.Drain(timeout_s, lame_duck_s, whole_s > 0))
            core.reactor.call_later(lame_duck_s + timeout_s + 1.0, self.start_stop)

    def front_drained(self, unfinished: int) -> None:
        """Continue the shutdown, because no request is in flight any more."""
        self._unfinished = unfinished
        out = QuiescenceState.OUT_OF_SERVICE.value
        self._core.events.record(EventKind.DRAINED, service=out, unfinished=unfinished)
        if unfinished:
            logger.warning("%d requests were not finished within the drain time", unfinished)
        self.start_stop()

    def start_stop(self) -> None:
        if self._core.lifecycle.state is not ServerState.DRAINING:
            return
        self._core.lifecycle.move(ServerState.STOPPING)
        front = self._core.front
        front.quit()
        # The front closes its own listeners. New connections are refused and do not wait in the backlog.
        self._core.listeners.close()
        if front.process is None:
            self.front_ended()
            return
        self._core.reactor.call_later(FRONT_QUIT_TIMEOUT_S, front.kill)

    def front_ended(self) -> None:
        """Stop the workers, because the front has ended."""
        self._ingress.close()  # a killed front leaves its ingress processes behind
        self._attached.end()
        self._models.stop()
        # Nobody waits for the answers of calls that are still running after the drain.
        self._core.reactor.call_later(stop_timeout_s(hurried=self._unfinished > 0), self.now)
        self.check_workers_stopped()

    def check_workers_stopped(self) -> None:
        if self._models.table.all_stopped():
            self.now()

    def now(self) -> None:
        self._core.reactor.stop()


def ended() -> StartupError:
    return StartupError("the server has been stopped")
