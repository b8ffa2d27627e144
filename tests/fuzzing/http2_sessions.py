"""What comes on a connection of HTTP/2, right and wrong: it is answered rightly, or the connection closed."""

from __future__ import annotations

import hpack
from http2_peer import PING_FRAME, POST, Peer, frame
from http2_scene import BodyReceiver, RecordingWay, Talk
from hypothesis import strategies as st

from fuzzing.cuts import cuts_of
from gpuserve.cli.bench.http2_client import HEAD_NBYTES
from gpuserve.front.net.exchange import AnswerHead

_OK = AnswerHead(200, (), [(b"grpc-status", b"0")])
#: Windows so large that none of the answers runs into them, whatever the session says of them.
_WINDOW = (1 << 31) - 1
_GET = ((":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "x"))
_FIELDS = st.sampled_from(
    [
        POST, POST, POST, _GET, POST[1:], (*POST, ("x", "y")), (*POST, (":x", "y")), (*POST, ("X", "y")),
        (*POST, ("connection", "close")), (*POST, ("content-length", "3")), (*POST, ("te", "gzip")),
        (("x", "y"),), (), (*POST, ("x", "v" * 9000)), (*POST, ("a b", "")), (*POST, ("x", "a\nb")),
    ]
)  # fmt: skip
_BLOCKS = st.one_of(
    _FIELDS.map(lambda fields: hpack.Encoder().encode([(*one, True) for one in fields])),
    st.binary(max_size=12),
)
_STREAMS = st.sampled_from([0, 1, 1, 1, 3, 3, 5, 2, 7, (1 << 31) - 1])
_FLAGS = st.sampled_from([0, 1, 4, 5, 8, 9, 0x20, 0x25, 0x2D, 0xFF])
_NUMBERS = st.sampled_from([0, 1, 8, 16384, 65535, 1 << 24, (1 << 31) - 1, (1 << 32) - 1]).map(
    lambda n: n.to_bytes(4)
)
_SETTINGS = st.lists(
    st.tuples(st.integers(0, 8), _NUMBERS).map(lambda one: one[0].to_bytes(2) + one[1]), max_size=3
).map(b"".join)
_PAYLOADS = {
    0: st.binary(max_size=40),
    1: _BLOCKS,
    2: st.binary(min_size=4, max_size=6),
    3: _NUMBERS,
    4: _SETTINGS,
    5: st.binary(max_size=8),
    6: st.just(bytes(8)),
    7: st.just(bytes(8)),
    8: _NUMBERS,
    9: _BLOCKS,
}
_KINDS = st.sampled_from([0, 0, 1, 1, 1, 1, 3, 4, 5, 6, 8, 8, 9, 2, 7, 10, 200])


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    """Mostly a right one."""
    if draw(st.integers(0, 2)):
        stream = draw(st.sampled_from([1, 3, 5, 7]))
        return draw(
            st.sampled_from(
                [
                    frame(1, 4, stream, hpack.Encoder().encode([(*one, True) for one in POST])),
                    frame(1, 5, stream, hpack.Encoder().encode([(*one, True) for one in _GET])),
                    frame(0, 0, stream, b"abc"),
                    frame(0, 1, stream, b"abc"),
                    frame(8, 0, stream, b"\0\0\0\x09"),
                    PING_FRAME,
                ]
            )
        )
    kind = draw(_KINDS)
    payload = draw(st.one_of(_PAYLOADS.get(kind, st.binary(max_size=20)), st.binary(max_size=9)))
    return frame(kind, draw(_FLAGS), draw(_STREAMS), payload)


@st.composite
def _spoilt(draw: st.DrawFn) -> bytes:
    data = bytearray(b"".join(draw(st.lists(_frames(), min_size=1, max_size=12))))
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1]))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


INPUTS = st.one_of(_spoilt(), st.binary(max_size=80))


def _answer(sink: BodyReceiver, end: bool) -> None:
    if end:
        sink.exchange.answer(_OK, (b"answer",), 6)


def _is_whole(data: bytes) -> bool:
    """Whether the last frame is there to its end."""
    position = 0
    while position + HEAD_NBYTES <= len(data):
        position += HEAD_NBYTES + int.from_bytes(data[position : position + 3])
    return position == len(data)


def check(data: bytes) -> None:
    """What the server sends is judged by the peer; after whole frames it answers a PING, or has closed."""
    peer = Peer(_WINDOW, (1 << 24) - 1)
    peer.window = 1 << 62
    talk = Talk(_answer, peer=peer, way=RecordingWay(hurried=len(data) % 2 == 1))
    talk.feed(data, cuts_of(data))
    if _is_whole(data):
        n_pongs = len(peer.pongs)
        talk.feed(PING_FRAME)
        assert talk.is_over or len(peer.pongs) == n_pongs + 1
    assert all(sink.n_abandoned <= 1 for sink in talk.sinks)
