"""Request bodies of one connection that do not end: which come too slowly, or not within the time that the
call itself gives, and how their clients are told. Nothing is noted for a stream until the connection is
looked at, about once a second: most have ended by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from gpuserve.front.exchange.exchange import grpc_timeout_s
from gpuserve.front.exchange.limits import Limits, slow_body
from gpuserve.front.exchange.watch import Pace
from gpuserve.front.server.http2.frames import ErrorCode
from gpuserve.front.server.http2.stream import State, Stream, refuse

_DEADLINE_EXCEEDED: Final = 4
_HEAD_NBYTES: Final = 1 << 10


class _Seen(NamedTuple):
    """A body that was not there whole, how it comes, and when its call ends. ``weight``: one request, and one
    more for each KiB of its head.
    """

    pace: Pace
    ends_at: float | None
    timeout_s: float | None
    weight: int


class Bodies:
    """The bodies that were seen under way. Pure: times come in."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    @property
    def weight(self) -> int:
        """How many there were when they were last looked at."""
        return sum([one.weight for one in self._seen.values()])

    def late(
        self, now: float, streams: Iterable[Stream], limits: Limits, *, has_room: bool
    ) -> Iterator[tuple[Stream, str]]:
        """The streams not waited for any longer, with the reason. Without ``has_room``,
        clients may not send.
        """
        seen = {
            one.id: self._seen.get(one.id) or _first_seen(one, now) for one in streams if _is_awaited(one)
        }
        self._seen = seen
        for stream in [one for one in streams if one.id in seen]:
            pace, ends_at, timeout_s, _ = seen[stream.id]
            moved = stream.received_nbytes if has_room and stream.receive_window > 0 else None
            if ends_at is not None and now >= ends_at:
                yield stream, f"the request did not come whole within its {timeout_s:g} s"
            elif pace.is_slow(now, moved, limits.body_grace_s, limits.min_body_rate):
                yield stream, slow_body(limits)


def _is_awaited(stream: Stream) -> bool:
    """Whether the end of the body is to come soon: a stream of requests may be open as long as it likes."""
    if stream.state is State.HALF_CLOSED_REMOTE:
        return False
    return not getattr(stream.sink, "is_stream", False)


def _first_seen(stream: Stream, now: float) -> _Seen:
    timeout_s = grpc_timeout_s(stream.head.headers) if stream.head.is_grpc else None
    weight = 1 + sum([len(name) + len(value) for name, value in stream.head.headers]) // _HEAD_NBYTES
    return _Seen(Pace(), None if timeout_s is None else now + timeout_s, timeout_s, weight)


def refuse_late(stream: Stream, text: str) -> None:
    """Answer a request that has not come whole, unless it is answered, and end its stream."""
    if not stream.started:
        refuse(stream, text, 408, _DEADLINE_EXCEEDED)
    stream.fail(ErrorCode.NO_ERROR)
