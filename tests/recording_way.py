"""The way out of a connection in tests, without a socket, of either version of HTTP."""

from __future__ import annotations

from gpuserve.front.net.admission import Limits
from gpuserve.front.net.exchange import ConnectionEndpoints


class RecordedWay:
    """What a connection asks of its way out besides writing."""

    def __init__(self, client: tuple[str, int], *, tls: bool, hurried: bool) -> None:
        #: Every turn is over after the least that can be taken.
        self.hurried = hurried
        self.waits = False
        self.endpoints = ConnectionEndpoints(client, ("127.0.0.1", 80), tls=tls)
        self.full = False
        self.limits = Limits()
        self.late: list[str] = []
        self.reading = True
        self.said: list[str] = []

    def count_late(self, reason: str) -> None:
        self.late.append(reason)

    def defers(self) -> bool:
        self.waits = self.hurried
        return self.hurried

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def end_writing(self) -> None:
        self.said.append("end")

    def close(self) -> None:
        self.said.append("close")

    def abort(self) -> None:
        self.said.append("abort")
