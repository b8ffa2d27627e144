"""The transport of a front with doors: it accepts connections, and hands each to a door. A connection that is
accepted while no door is up waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from gpuserve.config.settings.logs import LogSettings
from gpuserve.config.settings.tls import TlsFiles
from gpuserve.front.exchange.awaited import AwaitedRequests
from gpuserve.front.exchange.limits import Admission
from gpuserve.front.exchange.transport import DoorRow, Transport
from gpuserve.front.keeper.choice import LOOK_S, next_door
from gpuserve.front.keeper.door_process import DoorProcess
from gpuserve.front.keeper.kept_door import DoorState, KeptDoor, Newcomer, TellEvent
from gpuserve.front.passage import messages
from gpuserve.front.passage.passage import Passage
from gpuserve.front.remote.served_door import ServedDoor
from gpuserve.front.server.acceptor import Acceptor, own_listener
from gpuserve.front.server.connections import CLOSE_TIMEOUT_S
from gpuserve.front.server.handshakes import tls_context
from gpuserve.supervisor.control.front_messages import IngressDown, IngressUp

#: Where none comes up for so long the front cannot go on.
_START_TIMEOUT_S: Final = 30.0
#: So long a connection waits for a door.
_WAIT_S: Final = 10.0
#: What a door that ends may take, beyond what its connections may.
_END_S: Final = 2.0


class Doors(Transport):
    """``settings.doors`` processes that have the connections of the listeners, descriptors each with whether
    it speaks TLS. ``stop`` closes them, and ends what ``requests`` runs. ``ask`` has the supervisor start the
    process of a number; ``door_up`` and ``door_down`` answer.
    """

    def __init__(
        self,
        listeners: Mapping[int, bool],
        serve: Callable[[Passage], ServedDoor],
        requests: AwaitedRequests,
        admission: Admission,
        setup: messages.DoorSetup,
        tls: TlsFiles | None,
        tell_event: TellEvent,
        ask: Callable[[int], None],
    ) -> None:
        self._listeners = listeners
        self._requests = requests
        self._admission = admission
        self._setup = setup
        self._log = messages.DoorLog(LogSettings.of_level(setup.settings["log_level"])._asdict())
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._doors = [
            KeptDoor(
                number,
                self._greeting,
                serve,
                admission,
                ask,
                self._on_change,
                self._have_back,
                self._pass_round,
                tell_event,
            )
            for number in range(setup.settings["doors"])
        ]
        self._acceptors: list[Acceptor] = []
        self._waiting: deque[Newcomer] = deque()
        self._expiry: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Start the doors, and accept when one is up and no other is about to be, or one is that has survived
        the front before.
        """
        for door in self._doors:
            door.start()
        self._look()  # one that has survived may hang
        await self._until(
            lambda: not self._count(DoorState.STARTING) or any(map(_is_survivor, self._doors)),
            _START_TIMEOUT_S,
        )
        await self._until(lambda: bool(self._count(DoorState.UP)), _START_TIMEOUT_S)
        if not self._count(DoorState.UP):
            raise TimeoutError(f"no door came up within {_START_TIMEOUT_S:g} s")
        for fd, tls in self._listeners.items():
            acceptor = Acceptor(own_listener(fd), partial(self._take, tls))
            self._acceptors.append(acceptor)
            acceptor.open()

    async def stop(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        await asyncio.sleep(0)  # who has connected meanwhile is accepted: closing would reset the connection
        while self._acceptors:
            self._acceptors.pop().close()
        for fd in self._listeners:
            os.close(fd)
        self._turn_away(lambda _: True)
        for door in self._doors:
            door.stop()
        await self._until(self._have_ended, CLOSE_TIMEOUT_S + _END_S)
        for door in self._doors:
            door.kill()
        await self._until(self._have_ended, _END_S)
        await self._requests.stop()

    def announce(self) -> None:
        for door in self._doors:
            door.announce()

    @property
    def n_unaware(self) -> int:
        return sum(door.n_unaware for door in self._doors)

    @property
    def n_held(self) -> int:
        return sum(door.tally.counts.n_held for door in self._doors)

    def adjust(self, changes: Mapping[str, Any]) -> None:
        self._setup = self._setup._replace(settings={**self._setup.settings, **changes})
        for door in self._doors:
            door.tell(messages.AdjustDoor(dict(changes)))

    def limit_age(self, max_age_s: float) -> None:
        self.adjust({"max_connection_age_s": max_age_s})

    def log_as(self, settings: LogSettings) -> None:
        """Have the doors log so from now on."""
        self._log = messages.DoorLog(settings._asdict())
        for door in self._doors:
            door.tell(self._log)

    async def renew(self) -> None:
        if self._tls is not None:
            tls_context(self._tls)  # it would be too late to say that they are of no use
            for door in self._doors:
                door.tell(messages.Renew())

    def door_up(self, message: IngressUp, fds: list[int]) -> None:
        sock, pidfd = socket.socket(fileno=fds[0]), fds[1]
        process = DoorProcess(message.pid, pidfd)
        self._doors[message.number].up(process, sock, message.restarts, survived=message.survived)

    def door_down(self, message: IngressDown) -> None:
        self._doors[message.number].down(message.pid, message.reason)

    def doors(self) -> Iterator[DoorRow]:
        for door in self._doors:
            yield DoorRow(door.number, door.pid, door.state.value, door.n_open, door.tally.counts)

    # ---- connections ---------------------------------------------------------------------------

    def _take(self, tls: bool, accepted: socket.socket, address: str | None) -> None:
        if not self._admission.admit(address, accepted.fileno()):
            accepted.close()
            return
        self._waiting.append(Newcomer(accepted, address, tls, self._loop.time() + _WAIT_S))
        self._hand_out()

    def _hand_out(self) -> None:
        """Give who waits to a door, while there is one."""
        up = [door for door in self._doors if door.state is DoorState.UP]
        while self._waiting and (door := next_door(up, self._loop.time())) is not None:
            one = self._waiting.popleft()
            if door.n_open < self._admission.n_descriptors:
                door.give(one)
            else:
                n = self._admission.n_descriptors
                text = f"a connection is refused: every door has {n}, and only so many descriptors for them"
                self._admission.count_refused("descriptors", text)
                self._refuse(one)
        if self._waiting and self._expiry is None:
            self._expiry = self._loop.call_at(self._waiting[0].until_s, self._on_expiry)

    def _have_back(self, newcomers: Iterable[Newcomer]) -> None:
        """Another door is to have these, before who comes after them."""
        self._waiting.extendleft(reversed(list(newcomers)))
        if self._acceptors:
            self._hand_out()
        else:
            self._turn_away(lambda _: True)

    def _on_expiry(self) -> None:
        self._expiry = None
        now = self._loop.time()
        self._turn_away(lambda one: one.until_s <= now)
        self._hand_out()

    def _turn_away(self, is_over: Callable[[Newcomer], bool]) -> None:
        while self._waiting and is_over(self._waiting[0]):
            self._refuse(self._waiting.popleft())

    def _refuse(self, one: Newcomer) -> None:
        one.accepted.close()
        self._admission.leave(one.address)

    # ---- doors ---------------------------------------------------------------------------------

    def _greeting(self, door: KeptDoor) -> Iterator[Any]:
        yield self._setup._replace(door=door.number, counted=door.tally.counted)
        yield self._log

    def _pass_round(self, sender: KeptDoor, message: Any) -> None:
        for door in self._doors:
            if door is not sender:
                door.tell(message)

    def _on_change(self) -> None:
        self._changed.set()
        self._hand_out()

    def _look(self) -> None:
        for door in self._doors:
            door.look()
        self._next_look = self._loop.call_later(LOOK_S, self._look)

    def _count(self, state: DoorState) -> int:
        return sum(door.state is state for door in self._doors)

    def _have_ended(self) -> bool:
        return self._count(DoorState.ENDED) == len(self._doors)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a condition of the doors' states holds, but no longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()


def _is_survivor(door: KeptDoor) -> bool:
    return door.has_survived and door.state is DoorState.UP
