"""The life of a server as a whole, as states and a table."""

from __future__ import annotations

import enum
from typing import Final


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
