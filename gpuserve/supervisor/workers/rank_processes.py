"""The processes of one instance: one, or as many as it has ranks."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from gpuserve.config.settings.logs import REQUEST_IDS, log_with_text
from gpuserve.supervisor.processes.child_supervision import MonitoredChild, OnStacks
from gpuserve.supervisor.workers.worker_watchdogs import LoadWatchdog
from gpuserve_worker.protocol import wire

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
#: The interface of gloo's connections, unless the user sets another one. Otherwise gloo uses the interface of
#: the host's name, which a container may not resolve.
_GLOO_INTERFACE: Final = ("GLOO_SOCKET_IFNAME", "lo")


@dataclass(eq=False)
class RankProcess:
    """One rank of an instance, through its restarts; ``child`` is its process. ``fields`` identify the
    rank in log lines. The rank uses shared weights under ``name``.
    """

    number: int
    name: str
    fields: dict[str, Any]
    _on_broken: Callable[[RankProcess, str], None]
    child: MonitoredChild | None = None
    load: LoadWatchdog | None = None
    #: The message that the process sent when it was loaded or awake; None while it loads, sleeps or wakes.
    ready: wire.Ready | None = None

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        if self.child is not None and not self.child.send(message, fds):
            self._on_broken(self, "it does not read its boot socket")

    def log(self, record: wire.Log) -> None:
        """Log a record of the present process, unless its rate limit forbids that."""
        level, text, traceback, ids = record
        if self.child is not None and self.child.may_log(text + traceback + "".join(map(str, ids))):
            fields = {**self.fields, REQUEST_IDS: [str(one) for one in ids]}
            log_with_text(logger, level, text, traceback, fields)

    def enter_phase(self, phase: str) -> None:
        if self.load is not None:
            self.load.phase = phase

    def end_load(self) -> None:
        if self.load is not None:
            self.load.end()

    def close(self) -> None:
        """Reap the process, which has ended or was killed."""
        if self.child is not None:
            self.child.close()
            self.child = None


def reserved_port() -> socket.socket:
    """Return a socket that reserves a port of the loopback interface, on which it does not listen.

    The kernel gives the port to no other process that asks for any. Rank 0 can listen on it, because both
    sockets allow the reuse of the address, as stores of ``torch.distributed`` do.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((LOOPBACK, 0))
    return reserved


def rank_variables(rank: int, ranks: int, port: socket.socket | None) -> dict[str, str]:
    """Return the environment variables of a rank, which are those of torchrun; none without a port."""
    if port is None:
        return {}
    variables = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), f"{rank}"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), f"{ranks}"),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": f"{port.getsockname()[1]}",
    }
    name, interface = _GLOO_INTERFACE
    return variables if name in os.environ else {**variables, name: interface}


def ask_all_stacks(children: Sequence[MonitoredChild], on_stacks: OnStacks, *, is_ending: bool) -> None:
    """Request the stacks of all ranks of an instance, as ``ChildStacks.ask``. They arrive as one text."""
    texts: dict[int, str] = {}

    def receive(rank: int, text: str) -> None:
        texts[rank] = f"rank {rank}:\n{text}" if len(children) > 1 else text
        if len(texts) == len(children):
            on_stacks("\n".join(texts[one] for one in sorted(texts)))

    for rank, child in enumerate(children):
        child.stacks.ask(partial(receive, rank), is_ending=is_ending)
