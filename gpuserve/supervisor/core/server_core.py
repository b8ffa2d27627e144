"""What every part of a server stands on. Only the assembly (``supervisor.py``) makes one."""

from __future__ import annotations

from dataclasses import dataclass

from gpuserve.control.reactor import Reactor
from gpuserve.journal.event_journal import EventJournal
from gpuserve.supervisor.core.front_keeper import FrontKeeper
from gpuserve.supervisor.core.listeners import Listeners
from gpuserve.supervisor.core.log_lines import LogLines
from gpuserve.supervisor.core.server_life import ServerLife, SettingsInForce


@dataclass(frozen=True)
class ServerCore:
    """The life of one server, its settings, its reactor, its ports, its front, what happens in it,
    and what it logs."""

    life: ServerLife
    settings: SettingsInForce
    reactor: Reactor
    listeners: Listeners
    front: FrontKeeper
    events: EventJournal
    lines: LogLines
