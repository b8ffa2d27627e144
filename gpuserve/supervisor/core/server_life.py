"""The life of a server as a whole: its state, its settings as they are, and who watches."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Final

from gpuserve.config.settings.server import ServerSettings
from gpuserve.errors import Unavailable
from gpuserve.journal.event_journal import EventJournal
from gpuserve.journal.kinds import EventKind
from gpuserve.states import StepTable


class ServerState(enum.Enum):
    """Where the server as a whole stands."""

    STARTING = "STARTING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


STEPS: Final = StepTable(
    "the server",
    {
        ServerState.STOPPED: {ServerState.STARTING},
        ServerState.STARTING: {ServerState.SERVING, ServerState.STOPPING, ServerState.STOPPED},
        ServerState.SERVING: {ServerState.DRAINING, ServerState.STOPPING},
        ServerState.DRAINING: {ServerState.STOPPING},
        ServerState.STOPPING: {ServerState.STOPPED},
    },
)


class ServerLife:
    """Where a server stands; ``end()`` ends each run."""

    def __init__(self, events: EventJournal) -> None:
        self.state = ServerState.STOPPED
        self._events = events

    def move(self, state: ServerState) -> None:
        self.state = STEPS.step(self.state, state)
        self._events.tell(EventKind.SERVER_STATE, state=state.value)

    def end(self) -> None:
        """Enter STOPPED from any state, because nothing of the server is left."""
        self.state = ServerState.STOPPED
        self._events.tell(EventKind.SERVER_STATE, state=self.state.value)

    def why_not_now(self) -> Unavailable | None:
        """Say why nothing can be loaded, unloaded or changed at this moment; None where it can."""
        if self.state is ServerState.SERVING:
            return None
        return Unavailable("Server not ready" if self.state is ServerState.STARTING else "Server exiting")

    def why_not_operated(self) -> Unavailable | None:
        """Say why an operator can only ask for the status at this moment; None where he can do more."""
        if self.state is ServerState.SERVING:
            return None
        doing = "starting" if self.state is ServerState.STARTING else "stopping"
        return Unavailable(f"the server is {doing}, and takes no command but status")


class SettingsInForce:
    """The settings of a server as they are: some of them change while it runs. ``changed`` has those of the
    log and of traces that clients have changed, by their kind.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.now = settings
        self.changed: dict[str, dict[str, Any]] = {}

    def adjust(self, changes: dict[str, Any]) -> None:
        self.now = dataclasses.replace(self.now, **changes)


class ServerObserver:
    """Who shows the start of a server: the CLI's table, a log, a test; this one shows nothing. Called from
    the supervisor's own thread; must return at once.
    """

    def instance_changed(self, model: str, instance: str, device: str, state: str, phase: str) -> None:
        """An instance is in a new state (``InstanceState`` name) or a new phase of loading."""

    def server_ready(self, addresses: dict[str, str]) -> None:
        """Every model is loaded and the ports answer. Keys are "http", "grpc", "metrics" and "health"."""
