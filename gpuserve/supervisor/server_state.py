"""The life of a server as a whole, as states and a table."""

from __future__ import annotations

import enum
from typing import Final

from gpuserve.errors import Unavailable


class ServerState(enum.Enum):
    """Where the server as a whole stands."""

    STARTING = "STARTING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


TRANSITIONS: Final[dict[ServerState, frozenset[ServerState]]] = {
    ServerState.STARTING: frozenset({ServerState.SERVING, ServerState.STOPPING, ServerState.STOPPED}),
    ServerState.SERVING: frozenset({ServerState.DRAINING, ServerState.STOPPING}),
    ServerState.DRAINING: frozenset({ServerState.STOPPING}),
    ServerState.STOPPING: frozenset({ServerState.STOPPED}),
    ServerState.STOPPED: frozenset(),
}


class ServerLife:
    """One run of a server, from ``begin()`` to ``end()``."""

    def __init__(self) -> None:
        self.state = ServerState.STOPPED

    def begin(self) -> None:
        """It starts."""
        self.state = ServerState.STARTING

    def move(self, state: ServerState) -> None:
        """Move on.

        Raises:
            RuntimeError: the table has no such step: a defect of the supervisor.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"the server cannot go from {self.state.name} to {state.name}")
        self.state = state

    def end(self) -> None:
        """Nothing of it is left, wherever it stood."""
        self.state = ServerState.STOPPED

    def why_not_now(self) -> Unavailable | None:
        """Why nothing can be loaded, unloaded or changed at this moment."""
        if self.state is ServerState.SERVING:
            return None
        return Unavailable("Server not ready" if self.state is ServerState.STARTING else "Server exiting")

    def why_not_operated(self) -> Unavailable | None:
        """The same for an operator."""
        if self.state is ServerState.SERVING:
            return None
        doing = "starting" if self.state is ServerState.STARTING else "stopping"
        return Unavailable(f"the server is {doing}, and takes no command but status")
