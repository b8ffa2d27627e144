"""What carries the endpoint: a server on the listeners of the supervisor."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class DoorCounts(NamedTuple):
    """What a door has counted in all its time, by the names of ``Admission``; then what it holds now."""

    n_requests: int
    cpu_s: float
    restarts: int
    refused: Mapping[str, int]
    late: Mapping[str, int]
    limited: Mapping[str, int]
    intake_refused: int
    reclaimed: Mapping[str, int]
    n_held: int
    n_streams: int
    unsent_nbytes: int
    intake_nbytes: int
    arena_nbytes: int
    arena_blocks: int


class DoorRow(NamedTuple):
    """A door that is a process of its own."""

    number: int
    pid: int | None
    state: str
    n_connections: int
    counts: DoorCounts


class Transport(abc.ABC):
    """A server of the endpoint. What one cannot do, or need not, is as it is here."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Accept connections; returns once it does."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """Accept no more, and close the connections."""

    def announce(self) -> None:  # noqa: B027
        """Have clients told to send no more requests, each once; those before they have heard are served."""

    @property
    def n_unaware(self) -> int:
        """How many connections were told whose clients may not have heard of it."""
        return 0

    @property
    def n_held(self) -> int:
        """How many requests there are on connections whose clients were told; who watches health has none."""
        return 0

    def adjust(self, changes: Mapping[str, Any]) -> None:  # noqa: B027
        """Go by other limits from now on, by the names of ``Limits``, where ``Admission`` is not shared."""

    def doors(self) -> Iterable[DoorRow]:
        """The doors that are processes of their own."""
        return ()

    def door_up(self, message: Any, fds: list[int]) -> None:  # noqa: B027
        """Take the process of a door, of which the supervisor told by ``IngressUp``, with its descriptors."""

    def door_down(self, message: Any) -> None:  # noqa: B027
        """Note the end of the process of a door, of which the supervisor told by ``IngressDown``."""

    def limit_age(self, max_age_s: float) -> None:  # noqa: B027
        """Connections that are made from now on take requests for so long; 0 is for ever."""

    async def renew(self) -> None:  # noqa: B027
        """Use the files of TLS anew for new connections; OSError, ValueError: they are of no use."""
