"""All that serves operators in one place: the verbs, what they need of the front, and the control socket."""

from __future__ import annotations

from collections.abc import Callable

from gpuserve.settings import ServerSettings
from gpuserve.supervisor import messages
from gpuserve.supervisor.attached_models import AttachedModels
from gpuserve.supervisor.front_keeper import FrontKeeper
from gpuserve.supervisor.listeners import Listeners
from gpuserve.supervisor.load_requests import LoadRequests
from gpuserve.supervisor.operator.control_socket import ControlSocket
from gpuserve.supervisor.operator.front_census import FrontCensus
from gpuserve.supervisor.operator.quiescence import Quiescence
from gpuserve.supervisor.operator.status import OperatorStatus
from gpuserve.supervisor.operator.verbs import OperatorVerbs
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.reload.config_reload import ConfigReload
from gpuserve.supervisor.repository import Repository
from gpuserve.supervisor.served_models import ServedModels
from gpuserve.supervisor.server_state import ServerLife


class OperatorAccess:
    """Of one server. ``settings`` gives its settings as they are."""

    def __init__(
        self,
        life: ServerLife,
        reactor: Reactor,
        settings: Callable[[], ServerSettings],
        listeners: Listeners,
        front: FrontKeeper,
        models: ServedModels,
        attached: AttachedModels,
        loads: LoadRequests,
        repository: Repository,
        config: ConfigReload,
    ) -> None:
        self._quiescence = Quiescence(reactor, settings, front)
        self._census = FrontCensus(reactor, front)
        status = OperatorStatus(
            life,
            settings,
            listeners,
            front,
            self._census,
            models,
            attached,
            self._quiescence,
            config.path,
        )
        self.verbs = OperatorVerbs(
            life, models, attached, loads, repository, status, self._census, self._quiescence, config
        )
        self._listeners = listeners
        self._socket = ControlSocket(reactor, self.verbs.ask)

    def lame_duck_left_s(self) -> float:
        """How long requests are to be served yet when the server is told to end now."""
        return self._quiescence.lame_duck_left_s()

    def open(self) -> None:
        """Take an operator's commands from now on, by a name for each port that is open."""
        self._socket.open(self._listeners)

    def close(self) -> None:
        """Whoever waits for an answer is let go."""
        self._socket.close()

    def announce(self, front: FrontKeeper) -> None:
        """What a new front must know before it is ready."""
        self._quiescence.announce(front)

    def told(self, message: messages.Quiesced | messages.Census) -> None:
        """The front's answers."""
        match message:
            case messages.Quiesced(int(ticket), int(unfinished), bool(is_quiet)):
                self._quiescence.quiesced(ticket, unfinished, is_quiet=is_quiet)
            case messages.Census():
                self._census.taken(message)
