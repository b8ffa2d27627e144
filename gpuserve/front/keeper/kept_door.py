"""One door of a front: its process and those that come in its place, the connections that it was given, and
what it says of itself. The supervisor starts the processes when it is asked; one that has survived a front
brings its connections along.

::

    DOWN ──start──► STARTING ──first Status──► UP ──stop──► ENDING ──► ENDED
      ▲                 │                       │
      └──── it died ────┴───────────────────────┘        (any) ──stop──► ENDED
"""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from gpuserve.core.event_log import EventKind
from gpuserve.core.states import StepTable
from gpuserve.front.exchange.limits import Admission
from gpuserve.front.keeper.choice import FORCED_S, HUNG_S, LOOK_S, TOLD_S, RestartPatience
from gpuserve.front.keeper.door_process import DoorProcess
from gpuserve.front.keeper.tally import DoorTally
from gpuserve.front.passage import messages
from gpuserve.front.passage.passage import Passage
from gpuserve.front.remote.served_door import ServedDoor
from gpuserve.supervisor.control.heartbeat import LoopWatchdog, cpu_times, describe_process_state

logger = logging.getLogger(__name__)


class DoorState(enum.Enum):
    """What a front knows of one of its doors. Only one that is up is given connections."""

    DOWN = "DOWN"
    STARTING = "STARTING"
    UP = "UP"
    ENDING = "ENDING"
    ENDED = "ENDED"


STEPS: Final = StepTable(
    "door",
    {
        DoorState.DOWN: {DoorState.STARTING, DoorState.ENDED},
        DoorState.STARTING: {DoorState.UP, DoorState.DOWN, DoorState.ENDING},
        DoorState.UP: {DoorState.DOWN, DoorState.ENDING},
        DoorState.ENDING: {DoorState.ENDED},
        DoorState.ENDED: set(),
    },
)


class Newcomer(NamedTuple):
    """A connection that has its place, and no door yet. Where none is up, it waits for so long."""

    accepted: socket.socket
    address: str | None
    tls: bool
    until_s: float


class Running:
    """A process of a door, its passage, and what answers it."""

    def __init__(self, process: DoorProcess, passage: Passage, served: ServedDoor) -> None:
        self.process = process
        self.passage = passage
        self.served = served
        #: Who takes which message of the door.
        self.obeyed_by: Mapping[type, Callable[[Any], None]] = {}
        self.started_at = asyncio.get_running_loop().time()
        #: How many notices it was given, and the connections that it has, by the addresses of their clients.
        self.n_notices = 0
        self.addresses: Counter[str | None] = Counter()
        #: Those that it has not taken yet, which another can have if it dies.
        self.on_their_way: deque[Newcomer] = deque()
        self.silence = LoopWatchdog()
        self.is_told = False
        self.is_forced = False
        #: When it had last said something, as of the last look.
        self.looked_at = -1.0

    def take(self, taken: messages.TakenConnections) -> None:
        for _ in range(taken.n):
            self.on_their_way.popleft().accepted.close()


class TellEvent(Protocol):
    """Takes what happens to doors, for who watches the server."""

    def __call__(self, kind: EventKind, **facts: Any) -> None: ...


class KeptDoor:
    """The door of this number, kept up from ``start`` to ``stop``. ``greeting`` is what it is told first,
    ``serve`` makes what answers it, and its connections have places of ``admission``. ``ask`` has the
    supervisor start a process, or connect the one that has survived the front before: ``up`` or ``down``
    answers. ``on_change`` is called when its state is another; ``give_back`` gets connections that a dead one
    had not taken, ``pass_round`` sends a message to all other doors, and ``tell_event`` hears of deaths.
    """

    def __init__(
        self,
        number: int,
        greeting: Callable[[KeptDoor], Iterable[Any]],
        serve: Callable[[Passage], ServedDoor],
        admission: Admission,
        ask: Callable[[int], None],
        on_change: Callable[[], None],
        give_back: Callable[[Iterable[Newcomer]], None],
        pass_round: Callable[[KeptDoor, Any], None],
        tell_event: TellEvent,
    ) -> None:
        self.number = number
        self.state = DoorState.DOWN
        self.n_open = 0
        self.heard_at = 0.0
        self.tally = DoorTally()
        #: Whether its process had a front before this one.
        self.has_survived = False
        self._greeting = greeting
        self._serve = serve
        self._admission = admission
        self._ask = ask
        self._on_change = on_change
        self._give_back = give_back
        self._pass_round = pass_round
        self._tell_event = tell_event
        self._running: Running | None = None
        self._patience = RestartPatience()
        self._loop = asyncio.get_running_loop()

    @property
    def pid(self) -> int | None:
        return None if self._running is None else self._running.process.pid

    @property
    def n_unaware(self) -> int:
        """Connections whose clients may not have heard the notices, all of them where the door has not."""
        if self._running is None:
            return 0
        return self.tally.n_unaware(self._running.n_notices, self.n_open)

    def start(self) -> None:
        if self.state is not DoorState.DOWN:
            return
        self._become(DoorState.STARTING)
        self._ask(self.number)

    def up(self, process: DoorProcess, sock: socket.socket, restarts: int, *, survived: bool) -> None:
        """Greet the process; its pidfd and the socket are this door's from now on."""
        self.has_survived = survived
        passage = Passage(sock, self._hear, self._on_lost)
        running = self._running = Running(process, passage, self._serve(passage))
        running.obeyed_by = {
            **running.served.obey,
            messages.Holding: self._take_holding,
            messages.Status: self._take_status,
            messages.TakenConnections: running.take,
            messages.Left: self._take_left,
            messages.SpentTokens: lambda message: self._pass_round(self, message),
        }
        self.tally.restarted(restarts)
        passage.open()
        for message in self._greeting(self):
            passage.post(message)
        running.served.open()
        if self.state is DoorState.ENDING:  # it was stopped before this came
            passage.post(messages.StopDoor())

    def down(self, pid: int, reason: str) -> None:
        """The process has ended, or with pid 0 could not be started."""
        if self._running is not None and self._running.process.pid == pid:
            self._on_end(reason)
        elif self._running is None and self.state is DoorState.STARTING:
            self._die(reason, 0.0)
        elif self._running is None and self.state is DoorState.ENDING:
            self._become(DoorState.ENDED)

    def give(self, one: Newcomer) -> None:
        """Hand over a connection, of whose socket this has the care from now on."""
        assert self._running is not None
        self._running.addresses[one.address] += 1
        self._running.on_their_way.append(one)
        self.n_open += 1
        self._running.passage.send(messages.Connect(one.address, one.tls), (one.accepted.fileno(),))

    def tell(self, message: Any) -> None:
        """Say something that is in the greeting of a door that is started later."""
        if self._running is not None:
            self._running.passage.post(message)

    def announce(self) -> None:
        if self._running is not None:
            self._running.n_notices += 1
            self.tell(messages.Announce(self._running.n_notices))

    def stop(self) -> None:
        """Have it close its connections and end; it is not started again."""
        self.tell(messages.StopDoor())
        is_none = self._running is None and self.state is DoorState.DOWN
        self._become(DoorState.ENDED if is_none else DoorState.ENDING)

    def kill(self) -> None:
        if self._running is not None:
            self._running.process.kill()

    def look(self) -> None:
        """Kill it if it hangs, long after it showed where: called so often as ``choice.LOOK_S`` says."""
        if self._running is None:
            return
        running, pid = self._running, self._running.process.pid
        has_spoken = running.looked_at != self.heard_at
        running.looked_at = self.heard_at
        times = None if has_spoken else cpu_times(pid)
        silent_s = running.silence.poll(has_spoken, self._loop.time(), LOOK_S, times)
        if not silent_s:
            running.is_told = running.is_forced = False
        elif silent_s >= TOLD_S and not running.is_told:
            running.is_told = True
            logger.warning(
                "door %d has said nothing for %.3g s: %s", self.number, silent_s, describe_process_state(pid)
            )
            running.process.show_stacks()
        elif silent_s >= FORCED_S and not running.is_forced:
            running.is_forced = True
            running.process.show_stacks(forced=True)
        if silent_s >= HUNG_S:
            logger.error("door %d has said nothing for %g s, and is killed", self.number, HUNG_S)
            self._tell_event(EventKind.DOOR_HUNG, door=self.number, pid=self.pid, silent_s=HUNG_S)
            self.kill()

    # ---- what is heard ------------------------------------------------------------------------

    def _hear(self, message: Any, fds: list[int]) -> None:
        assert self._running is not None
        if fds:
            self._running.served.attach(message, fds)
        else:
            self._running.obeyed_by[type(message)](message)

    def _take_holding(self, holding: messages.Holding) -> None:
        """Count the connections that it has kept from a front before."""
        assert self._running is not None
        for address in holding.addresses:
            self._running.addresses[address] += 1
            self.n_open += 1
            self._admission.admit_again(address)

    def _take_status(self, status: messages.Status) -> None:
        self.heard_at = self._loop.time()
        self.tally.note(status)
        if self.state is DoorState.STARTING:
            if self.tally.restarts:
                logger.info("door %d is up again", self.number)
            self._become(DoorState.UP)

    def _take_left(self, left: messages.Left) -> None:
        assert self._running is not None
        for address in left.addresses:
            self._running.addresses[address] -= 1
            self.n_open -= 1
            self._admission.leave(address)
        self._running.addresses += Counter()  # which drops those that have none

    def _on_lost(self) -> None:
        """It has said its last. Its process ends in this moment, or can be used no more."""
        assert self._running is not None
        self._running.process.kill()

    def _on_end(self, reason: str) -> None:
        running = self._running
        assert running is not None
        running.passage.finish()  # it may have said more than was read
        self._running = None
        running.served.close()
        running.process.close()
        self.tally.end()
        running.addresses -= Counter(one.address for one in running.on_their_way)
        for address in running.addresses.elements():
            self._admission.leave(address)
        self.n_open = 0
        if self.state is DoorState.ENDING:
            self._become(DoorState.ENDED)
        else:
            text = f"{reason}, with {running.addresses.total()} connections"
            self._die(text, self._loop.time() - running.started_at)
        self._give_back(running.on_their_way)

    def _die(self, reason: str, lived_s: float) -> None:
        pause_s = self._patience.pause_s(lived_s, came_up=self.state is DoorState.UP)
        when = f"in {pause_s:g} s" if pause_s else "at once"
        logger.error("door %d ended (%s); it is started again %s", self.number, reason, when)
        self._tell_event(EventKind.DOOR_DIED, door=self.number, reason=reason, restart_in_s=pause_s)
        self._become(DoorState.DOWN)
        self._loop.call_later(pause_s, self.start)

    def _become(self, state: DoorState) -> None:
        self.state = STEPS.step(self.state, state, self.number)
        self._on_change()
