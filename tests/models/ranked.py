"""A model of several ranks, whose collective is a sum over sockets; a rank fails where a request says so."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

#: First value of a request's row: the rank in the second value fails in a way of ``FAULTS``.
FAULT: Final = -13.0


def hang() -> None:
    while True:
        time.sleep(60)


def refuse() -> None:
    raise ValueError("this rank does not like it")


#: By the third value of the row.
FAULTS: Final[list[Callable[[], None]]] = [
    lambda: os.kill(os.getpid(), signal.SIGKILL),
    refuse,
    hang,
    lambda: os._exit(0),
    lambda: time.sleep(1),
]
#: The rank of a fault that happens in every rank.
ALL: Final = 99.0


class Group:
    """The sum of a number over all ranks, with rank 0 in the middle."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if self.rank:
            deadline = time.monotonic() + 30
            while True:
                try:
                    self.peers = [socket.create_connection(address)]
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
        else:
            with socket.create_server(address) as server:
                self.peers = [server.accept()[0] for _ in range(self.size - 1)]

    def sum(self, value: float) -> float:
        if self.rank:
            self._send(self.peers[0], value)
            return self._receive(self.peers[0])
        total = value + sum(map(self._receive, self.peers))
        for one in self.peers:
            self._send(one, total)
        return total

    def _send(self, peer: socket.socket, value: float) -> None:
        peer.sendall(np.float64(value).tobytes())

    def _receive(self, peer: socket.socket) -> float:
        data = peer.recv(8, socket.MSG_WAITALL)
        if len(data) < 8:
            raise ConnectionError("a peer is gone")
        return float(np.frombuffer(data)[0])


class Ranked:
    """Answers x times the sum of all ranks' (rank + 1) * tag, if all ranks have seen the same bytes.

    ``directory`` holds a file ``once`` for a fault that shall happen once. Each rank writes its calls to a
    file there, and its end.
    """

    def __init__(self, directory: str, tag: float = 1.0, load_s: float = 0.0) -> None:
        time.sleep(load_s)
        self.directory, self.tag, self.calls = Path(directory), tag, 0
        self.group = Group()
        place = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        file = self.directory / f"rank-{self.group.rank}"
        file.write_text(json.dumps({**place, "pid": os.getpid()}))

    def __call__(self, requests: Any) -> Any:
        self.calls += 1
        return [self.answer(request["x"]) for request in requests]

    def answer(self, x: Any) -> dict[str, Any]:
        assert not x.flags.writeable, "another rank could see what this one writes"
        if x.flat[0] == FAULT:
            self.fail(float(x.flat[1]), int(x.flat[2]))
        total = self.group.sum((self.group.rank + 1) * self.tag)
        checksum = self.group.sum(float(x.sum(dtype=np.float64)))
        assert checksum == self.group.size * float(x.sum(dtype=np.float64)), "ranks saw different bytes"
        if self.group.rank:
            return {"dropped": None}
        return {"y": x * np.float32(total)}

    def fail(self, rank: float, fault: int) -> None:
        if rank not in (ALL, self.group.rank):
            return
        once = self.directory / "once"
        if once.exists():
            once.unlink()
            FAULTS[fault]()
        elif rank == ALL:
            FAULTS[fault]()

    def close(self) -> None:
        (self.directory / f"closed-{self.group.rank}").touch()


class Dozing(Ranked):
    """As ``Ranked``, and can sleep. Other ranks return later than rank 0, and no rank may sleep before.
    A rank whose number is in a file ``refuses`` raises in ``sleep``.
    """

    is_running = False

    def __call__(self, requests: Any) -> Any:
        self.is_running = True
        answers = super().__call__(requests)
        if self.group.rank:
            time.sleep(0.3)
        self.is_running = False
        return answers

    def sleep(self) -> None:
        assert not self.is_running, "a call runs"
        refuses = self.directory / "refuses"
        if refuses.exists() and int(refuses.read_text()) == self.group.rank:
            raise OSError("no sleep")
        self._note("sleep")

    def wake(self) -> None:
        self.group.sum(1.0)  # all ranks wake at once
        self._note("wake")

    def _note(self, what: str) -> None:
        with (self.directory / f"naps-{self.group.rank}").open("a") as naps:
            naps.write(f"{what} ")


async def awaits(requests: Any) -> Any:
    return first_value(requests)


class Steps:
    def admit(self, request: Any) -> Any:
        return request

    def step(self, active: Any) -> Any:
        return []


def first_value(requests: Any) -> Any:
    """Answers without a collective."""
    return [{"y": request["x"][:, :1]} for request in requests]
