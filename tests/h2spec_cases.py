"""The cases of h2spec 2.6 by their names: what each sends after the greeting, and what it expects.

h2spec itself is a Go program that cannot be had everywhere. Where it takes any end of the connection for the
error that it expects, the error itself is asked for here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import hpack
from http2_peer import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PING_FRAME,
    PREFACE,
    PRIORITIZED,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    Frame,
    data,
    frame,
    grow,
    reset,
    settings,
    u32,
)

from gpuserve.cli.bench.http2_client import (
    ENABLE_PUSH,
    FIRST_FRAME_NBYTES,
    INITIAL_WINDOW,
    MAX_FRAME,
    MAX_STREAMS,
    TABLE_SIZE,
)

MODEL = "echo_FP32"
#: Of the server: how large a frame it takes, and how many streams at once.
SERVER_FRAME_NBYTES = 256 << 10
SERVER_STREAMS = 4096
#: What is seen where the server ends the connection.
END = Frame(-1, 0, 0)

Field: TypeAlias = "tuple[str, str]"
Expected: TypeAlias = "Callable[[Frame], bool]"


class Case(NamedTuple):
    """Bytes to send, and between them what is waited for; and what is expected at last."""

    name: str
    what: str
    expected: Expected
    steps: tuple[bytes | Expected, ...]


# ---- what comes ---------------------------------------------------------------------------


def answered(one: Frame) -> bool:
    return one.kind == HEADERS and one.stream_id == 1


def answered_in_part(one: Frame) -> bool:
    """One byte of a body, where the window lets no more through."""
    return one.kind == DATA and len(one.payload) == 1


def has_body(one: Frame) -> bool:
    return one.kind == DATA


def over(one: Frame) -> bool:
    return one.kind in (HEADERS, DATA) and bool(one.flags & END_STREAM)


def pong(one: Frame) -> bool:
    return one == Frame(PING, ACK, 0, PING_FRAME[9:])


def greeted(one: Frame) -> bool:
    return one.kind == SETTINGS and not one.flags & ACK


def acknowledged(one: Frame) -> bool:
    return one == Frame(SETTINGS, ACK, 0)


def closed(one: Frame) -> bool:
    return one == END


def fails(*codes: int) -> Expected:
    """An error of the connection."""
    return lambda one: one.kind == GOAWAY and int.from_bytes(one.payload[4:8]) in codes


def resets(*codes: int) -> Expected:
    """An error of the stream; that of the connection will do."""
    fails_so = fails(*codes)
    return lambda one: (
        fails_so(one)
        or (one.kind == RST_STREAM and one.stream_id != 0 and int.from_bytes(one.payload) in codes)
    )


# ---- what is sent -------------------------------------------------------------------------

GET: tuple[Field, ...] = (
    (":method", "GET"),
    (":scheme", "http"),
    (":path", "/v2"),
    (":authority", "localhost"),
)
POST = ((":method", "POST"), GET[1], (":path", f"/v2/models/{MODEL}/infer"), GET[3])
LONG = ("x-dummy0", "x" * 4000)
WHOLE = END_STREAM | END_HEADERS
BLOCK = hpack.Encoder().encode(GET)
MORE = hpack.Encoder().encode([LONG])


def head(fields: tuple[Field, ...] = GET, flags: int = WHOLE, stream: int = 1) -> bytes:
    return coded(hpack.Encoder().encode(fields), flags, stream)


def coded(block: bytes, flags: int = WHOLE, stream: int = 1) -> bytes:
    """The HEADERS frame of a block."""
    return frame(HEADERS, flags, stream, block)


def with_field(coded_field: bytes) -> bytes:
    """A request with one more field, so encoded."""
    return coded(BLOCK + coded_field)


def go_on(block: bytes, flags: int = END_HEADERS, stream: int = 1) -> bytes:
    return frame(CONTINUATION, flags, stream, block)


def priority(stream: int, weight: int = 255, depends_on: int = 0) -> bytes:
    return frame(PRIORITY, 0, stream, u32(depends_on) + bytes((weight,)))


def without(fields: tuple[Field, ...], name: str) -> tuple[Field, ...]:
    return tuple(field for field in fields if field[0] != name)


ASK = head()
BEGUN = head(POST, END_HEADERS)
UNFINISHED = head(flags=END_STREAM)
TEST = data(1, b"test", end=True)
PART = data(1, b"test")
UNKNOWN = frame(0x16, payload=bytes(8))
NO_WINDOW = settings({INITIAL_WINDOW: 0})
ONE_BYTE = settings({INITIAL_WINDOW: 1})
NEW = b"\x06x-test\x06h2spec"
NAMED = b"\x0auser-agent\x06h2spec"
NEW_CODED = b"\x85\xf2\xb2\x4a\x84\xff\x84\x9c\x48\xac\xa4"
NAMED_CODED = b"\x87\xb5\x05\xb1\x61\xcc\x5a\x93\x84\x9c\x48\xac\xa4"
WRONG = fails(PROTOCOL_ERROR)
WRONG_STREAM = resets(PROTOCOL_ERROR)
WRONG_SIZE = fails(FRAME_SIZE_ERROR)
WRONG_CODE = fails(COMPRESSION_ERROR)
CLOSED_STREAM = resets(STREAM_CLOSED)

#: By section: what is sent in words, what is expected, and the bytes.
_SECTIONS: dict[str, tuple[tuple[str, Expected, *tuple[bytes | Expected, ...]], ...]] = {
    "generic/1": (("the preface, on a connection of its own", greeted),),
    "generic/2": (
        ("PRIORITY on an idle stream", pong, priority(1), PING_FRAME),
        ("WINDOW_UPDATE on a half-closed stream", has_body, NO_WINDOW, ASK, grow(1, 1)),
        ("PRIORITY on a half-closed stream", has_body, NO_WINDOW, ASK, priority(1), grow(1, 1)),
        ("RST_STREAM on a half-closed stream", pong, ASK, reset(1), PING_FRAME),
        ("PRIORITY on a closed stream", pong, ASK, over, priority(1), PING_FRAME),
    ),
    "generic/3.1": (
        ("a DATA frame", answered, BEGUN, TEST),
        ("several DATA frames", answered, BEGUN, PART, TEST),
        ("a padded DATA frame", answered, BEGUN, frame(DATA, END_STREAM | PADDED, 1, b"\x06testpadded")),
    ),
    "generic/3.2": (
        ("a HEADERS frame", answered, ASK),
        ("a padded HEADERS frame", answered, coded(b"\x08" + BLOCK + bytes(8), WHOLE | PADDED)),
        ("a HEADERS frame with priority", answered, coded(bytes(4) + b"\xff" + BLOCK, WHOLE | PRIORITIZED)),
    ),
    "generic/3.3": (
        ("PRIORITY of weight 1", answered, priority(1, 0), ASK),
        ("PRIORITY of weight 256", answered, priority(1, 255), ASK),
        ("PRIORITY with a dependency", answered, priority(3, 0, 1), ASK),
        ("PRIORITY, exclusive", answered, priority(1, 0, 1 << 31), ASK),
        ("PRIORITY of an idle stream above the request's", answered, priority(3), ASK),
    ),
    "generic/3.4": (("RST_STREAM", pong, head(flags=END_HEADERS), reset(1), PING_FRAME),),
    "generic/3.5": (
        (
            "all SETTINGS",
            acknowledged,
            settings(
                {
                    TABLE_SIZE: 4096,
                    ENABLE_PUSH: 1,
                    MAX_STREAMS: 100,
                    INITIAL_WINDOW: 65535,
                    MAX_FRAME: 16384,
                    6: 100,
                }
            ),
        ),
    ),
    "generic/3.7": (("PING", pong, PING_FRAME),),
    "generic/3.8": (("GOAWAY", closed, frame(GOAWAY, payload=bytes(8) + b"h2spec")),),
    "generic/3.9": (
        ("WINDOW_UPDATE of the connection", pong, grow(0, 1), PING_FRAME),
        ("WINDOW_UPDATE of a stream", answered, ASK, grow(1, 1)),
    ),
    "generic/3.10": (
        ("CONTINUATION", answered, coded(BLOCK[:5], END_STREAM), go_on(BLOCK[5:])),
        ("CONTINUATIONs", answered, coded(BLOCK[:5], END_STREAM), go_on(BLOCK[5:10], 0), go_on(BLOCK[10:])),
    ),
    "generic/4": (
        ("GET", answered, ASK),
        ("HEAD", answered, head(((":method", "HEAD"), *GET[1:]))),
        ("POST", answered, BEGUN, TEST),
        (
            "POST with trailers",
            answered,
            head((*POST, ("trailer", "x-test")), END_HEADERS),
            PART,
            head((("x-test", "ok"),)),
        ),
    ),
    "generic/5": (
        ("an indexed field", answered, with_field(b"\xba")),
        ("indexing, a known name", answered, with_field(b"\x40" + NAMED)),
        ("indexing, a known name in Huffman code", answered, with_field(b"\x40" + NAMED_CODED)),
        ("indexing, a new name", answered, with_field(b"\x40" + NEW)),
        ("indexing, a new name in Huffman code", answered, with_field(b"\x40" + NEW_CODED)),
        ("no indexing, a known name", answered, with_field(b"\0" + NAMED)),
        ("no indexing, a known name in Huffman code", answered, with_field(b"\0" + NAMED_CODED)),
        ("no indexing, a new name", answered, with_field(b"\0" + NEW)),
        ("no indexing, a new name in Huffman code", answered, with_field(b"\0" + NEW_CODED)),
        ("never indexed, a known name", answered, with_field(b"\x10" + NAMED)),
        ("never indexed, a known name in Huffman code", answered, with_field(b"\x10" + NAMED_CODED)),
        ("never indexed, a new name", answered, with_field(b"\x10" + NEW)),
        ("never indexed, a new name in Huffman code", answered, with_field(b"\x10" + NEW_CODED)),
        ("a new size of the table", answered, coded(b"\x20" + BLOCK)),
        ("two new sizes of the table", answered, coded(b"\x20\x3f\xe1\x1f" + BLOCK)),
    ),
    "http2/3.5": (
        ("the preface", greeted),
        ("no preface", closed, b"INVALID CONNECTION PREFACE\r\n\r\n"),
    ),
    "http2/4.1": (
        ("a frame of an unknown type", pong, UNKNOWN, PING_FRAME),
        ("undefined flags", pong, frame(PING, 0x16, 0, PING_FRAME[9:])),
        ("the reserved bit", pong, frame(PING, 0x16, 1 << 31, PING_FRAME[9:])),
    ),
    "http2/4.2": (
        ("DATA of 2^14 bytes", answered, BEGUN, data(1, bytes(FIRST_FRAME_NBYTES), end=True)),
        (
            "DATA larger than the server's frames",
            resets(FRAME_SIZE_ERROR),
            *(BEGUN, data(1, bytes(SERVER_FRAME_NBYTES + 1), end=True)),
        ),
        (
            "HEADERS of more than 2^14 bytes",
            WRONG_SIZE,
            coded(BLOCK + b"".join(b"\0\x01%d\x7f\xa1\x1e" % n + b"x" * 4000 for n in range(5))),
        ),
    ),
    "http2/4.3": (
        ("a block that is cut off", WRONG_CODE, coded(b"\x40")),
        ("PRIORITY within a block", WRONG, head(flags=0), priority(1), go_on(MORE)),
        ("HEADERS of another stream within a block", WRONG, head(flags=0), head(stream=3), go_on(MORE)),
    ),
    "http2/5.1": (
        ("DATA, idle", WRONG, TEST),
        ("RST_STREAM, idle", WRONG, reset(1)),
        ("WINDOW_UPDATE, idle", WRONG, grow(1, 100)),
        ("CONTINUATION, idle", WRONG, go_on(BLOCK)),
        ("DATA, half-closed", CLOSED_STREAM, ASK, TEST),
        ("HEADERS, half-closed", CLOSED_STREAM, ASK, ASK),
        ("CONTINUATION, half-closed", resets(STREAM_CLOSED, PROTOCOL_ERROR), ASK, go_on(BLOCK)),
        ("DATA after a reset", CLOSED_STREAM, BEGUN, reset(1), TEST),
        ("HEADERS after a reset", CLOSED_STREAM, BEGUN, reset(1), ASK),
        ("CONTINUATION after a reset", resets(STREAM_CLOSED, PROTOCOL_ERROR), BEGUN, reset(1), go_on(MORE)),
        ("DATA, closed", fails(STREAM_CLOSED), ASK, over, TEST),
        ("HEADERS, closed", fails(STREAM_CLOSED), ASK, over, ASK),
        ("CONTINUATION, closed", fails(STREAM_CLOSED, PROTOCOL_ERROR), ASK, over, go_on(MORE)),
    ),
    "http2/5.1.1": (
        ("an even stream", WRONG, head(stream=2)),
        ("a stream below the last one", WRONG, head(stream=5), head(stream=3)),
    ),
    "http2/5.1.2": (
        (
            "more streams than may be open",
            resets(PROTOCOL_ERROR, REFUSED_STREAM),
            *(NO_WINDOW, b"".join(coded(BLOCK, WHOLE, 2 * n + 1) for n in range(SERVER_STREAMS + 1))),
        ),
    ),
    "http2/5.3.1": (
        (
            "HEADERS that depend on themselves",
            WRONG_STREAM,
            coded(u32(1) + b"\xff" + BLOCK, WHOLE | PRIORITIZED),
        ),
        ("PRIORITY that depends on itself", WRONG_STREAM, priority(1, 255, 1)),
    ),
    "http2/5.4.1": (("a wrong PING, for the end of the connection", closed, frame(PING, 0, 3, bytes(8))),),
    "http2/5.5": (
        ("an extension frame", pong, UNKNOWN, PING_FRAME),
        ("an extension frame within a block", WRONG, UNFINISHED, UNKNOWN),
    ),
    "http2/6.1": (
        ("DATA on stream 0", WRONG, data(0, b"test", end=True)),
        ("DATA on a stream that has ended", CLOSED_STREAM, head(POST), TEST),
        (
            "DATA with more padding than bytes",
            WRONG,
            *(
                head((*POST, ("content-length", "4")), END_HEADERS),
                frame(DATA, END_STREAM | PADDED, 1, b"\x06Test"),
            ),
        ),
    ),
    "http2/6.2": (
        ("PRIORITY in the place of CONTINUATION", WRONG, head(flags=0), priority(1), go_on(MORE)),
        ("HEADERS of another stream in its place", WRONG, head(flags=0), head(stream=3), go_on(MORE)),
        ("HEADERS on stream 0", WRONG, head(stream=0)),
        (
            "HEADERS with more padding than bytes",
            WRONG_STREAM,
            coded(bytes((len(BLOCK) + 2,)) + BLOCK, WHOLE | PADDED),
        ),
    ),
    "http2/6.3": (
        ("PRIORITY on stream 0", WRONG, priority(0)),
        ("PRIORITY of 4 bytes", resets(FRAME_SIZE_ERROR), ASK, frame(PRIORITY, 0, 1, b"\x80\0\0\x01")),
    ),
    "http2/6.4": (
        ("RST_STREAM on stream 0", WRONG, reset(0)),
        ("RST_STREAM on an idle stream", WRONG, reset(1)),
        ("RST_STREAM of 3 bytes", WRONG_SIZE, ASK, frame(RST_STREAM, 0, 1, bytes(3))),
    ),
    "http2/6.5": (
        ("an acknowledgement with a payload", WRONG_SIZE, frame(SETTINGS, ACK, 0, b"\0")),
        ("SETTINGS on stream 1", WRONG, frame(SETTINGS, 0, 1, b"\0\x03\0\0\0\x64")),
        ("SETTINGS of 8 bytes", fails(PROTOCOL_ERROR, FRAME_SIZE_ERROR), frame(SETTINGS, payload=bytes(8))),
    ),
    "http2/6.5.2": (
        ("ENABLE_PUSH is 2", WRONG, settings({ENABLE_PUSH: 2})),
        ("INITIAL_WINDOW_SIZE is 2^31", fails(FLOW_CONTROL_ERROR), settings({INITIAL_WINDOW: 1 << 31})),
        ("MAX_FRAME_SIZE is 2^14 - 1", WRONG, settings({MAX_FRAME: (1 << 14) - 1})),
        ("MAX_FRAME_SIZE is 2^24", WRONG, settings({MAX_FRAME: 1 << 24})),
        ("an unknown setting", pong, settings({0xFF: 1}), PING_FRAME),
    ),
    "http2/6.5.3": (
        (
            "a window that is set twice",
            answered_in_part,
            *(settings([(INITIAL_WINDOW, 100), (INITIAL_WINDOW, 1)]), acknowledged, ASK),
        ),
        ("SETTINGS", acknowledged, settings({ENABLE_PUSH: 0})),
    ),
    "http2/6.7": (
        ("PING", pong, PING_FRAME),
        ("an acknowledgement of no PING", pong, frame(PING, ACK, 0, b"\0" * 8), PING_FRAME),
        ("PING on stream 1", WRONG, frame(PING, 0, 1, bytes(8))),
        ("PING of 6 bytes", fails(PROTOCOL_ERROR, FRAME_SIZE_ERROR), frame(PING, 0, 0, bytes(6))),
    ),
    "http2/6.8": (("GOAWAY on stream 1", WRONG, frame(GOAWAY, 0, 1, bytes(8))),),
    "http2/6.9": (
        ("WINDOW_UPDATE of 0", WRONG, grow(0, 0)),
        ("WINDOW_UPDATE of 0 on a stream", WRONG_STREAM, BEGUN, grow(1, 0)),
        ("WINDOW_UPDATE of 3 bytes", WRONG_SIZE, frame(0x8, 0, 0, b"\0\0\x01")),
    ),
    "http2/6.9.1": (
        ("a window of 1", answered_in_part, ONE_BYTE, acknowledged, ASK),
        ("a window above 2^31 - 1", fails(FLOW_CONTROL_ERROR), grow(0, (1 << 31) - 1) * 2),
        ("a stream's window above 2^31 - 1", resets(FLOW_CONTROL_ERROR), BEGUN, grow(1, (1 << 31) - 1) * 2),
    ),
    "http2/6.9.2": (
        ("a window that is set after the request", answered_in_part, NO_WINDOW, acknowledged, ASK, ONE_BYTE),
        (
            "a window that becomes negative",
            answered_in_part,
            *(settings({INITIAL_WINDOW: 3}), acknowledged, ASK, has_body),
            *(settings({INITIAL_WINDOW: 2}), acknowledged, grow(1, 2)),
        ),
        ("a window of 2^31", fails(FLOW_CONTROL_ERROR), settings({INITIAL_WINDOW: 1 << 31})),
    ),
    "http2/6.10": (
        ("CONTINUATIONs", answered, UNFINISHED, go_on(MORE, 0), go_on(MORE)),
        ("DATA after CONTINUATION", WRONG, head(POST, 0), go_on(MORE, 0), TEST),
        ("CONTINUATION on stream 0", WRONG, UNFINISHED, go_on(MORE, stream=0)),
        ("CONTINUATION after a whole HEADERS", WRONG, ASK, go_on(MORE)),
        ("CONTINUATION after the last one", WRONG, UNFINISHED, go_on(MORE), go_on(MORE)),
        ("CONTINUATION after DATA", WRONG, head(POST, 0), TEST, go_on(MORE, 0), go_on(MORE, stream=0)),
    ),
    "http2/7": (
        ("GOAWAY with an unknown error", closed, frame(GOAWAY, payload=bytes(7) + b"\xff")),
        ("RST_STREAM with an unknown error", pong, BEGUN, reset(1, 0xFF), PING_FRAME),
    ),
    "http2/8.1": (
        ("trailers that do not end", WRONG_STREAM, BEGUN, PART, head((("x-test", "ok"),), END_HEADERS)),
    ),
    "http2/8.1.2": (("a name in upper case", WRONG_STREAM, head((*GET, ("X-TEST", "ok")))),),
    "http2/8.1.2.1": (
        ("an unknown pseudo field", WRONG_STREAM, head((*GET, (":test", "ok")))),
        ("a pseudo field of responses", WRONG_STREAM, head((*GET, (":status", "200")))),
        ("a pseudo field in trailers", WRONG_STREAM, BEGUN, PART, head((POST[0],), END_HEADERS)),
        ("a pseudo field after another field", WRONG_STREAM, head((("x-test", "ok"), *GET))),
    ),
    "http2/8.1.2.2": (
        ("a field of the connection", WRONG_STREAM, head((*GET, ("connection", "keep-alive")))),
        (
            "te that is not trailers",
            WRONG_STREAM,
            head((*GET, ("trailers", "test"), ("te", "trailers, deflate"))),
        ),
    ),
    "http2/8.1.2.3": (
        ("an empty path", WRONG_STREAM, head((*GET[:2], (":path", ""), GET[3]))),
        ("no method", WRONG_STREAM, head(without(GET, ":method"))),
        ("no scheme", WRONG_STREAM, head(without(GET, ":scheme"))),
        ("no path", WRONG_STREAM, head(without(GET, ":path"))),
        ("two methods", WRONG_STREAM, head((*GET, GET[0]))),
        ("two schemes", WRONG_STREAM, head((*GET, GET[1]))),
        ("a path as a second method", WRONG_STREAM, head((*GET, (":method", GET[2][1])))),
    ),
    "http2/8.1.2.6": (
        (
            "a body longer than it should be",
            WRONG_STREAM,
            *(head((*POST, ("content-length", "1")), END_HEADERS), TEST),
        ),
        (
            "a body in parts that is longer",
            WRONG_STREAM,
            *(head((*POST, ("content-length", "1")), END_HEADERS), PART, TEST),
        ),
    ),
    "http2/8.2": (("PUSH_PROMISE", WRONG, frame(PUSH_PROMISE, END_HEADERS, 1, u32(3) + BLOCK)),),
    "hpack/2.3.3": (
        ("an index that no table has", WRONG_CODE, with_field(b"\xfe")),
        ("a name with such an index", WRONG_CODE, with_field(b"\x7f\x07\0")),
    ),
    "hpack/4.2": (("a new size of the table at the end", WRONG_CODE, with_field(b"\x21")),),
    "hpack/5.2": (
        (
            "padding of more than 7 bits",
            WRONG_CODE,
            with_field(b"\0\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff"),
        ),
        ("padding of zeros", WRONG_CODE, with_field(b"\0\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90")),
        (
            "the end of string within one",
            WRONG_CODE,
            with_field(b"\0\x85\xf2\xb2\x4a\x87\xff\xff\xff\xfd\x25\x42\x7f"),
        ),
    ),
    "hpack/6.1": (("index 0", WRONG_CODE, with_field(b"\x80")),),
    "hpack/6.3": (("a size of the table above the limit", WRONG_CODE, coded(b"\x3f\xe2\x1f" + BLOCK)),),
}


def _all() -> Iterator[Case]:
    for section, rows in _SECTIONS.items():
        for number, (what, expected, *steps) in enumerate(rows, 1):
            yield Case(f"{section}/{number}", what, expected, tuple(steps))


CASES = tuple(_all())
#: What begins with other bytes than a greeting.
UNGREETED = {"http2/3.5/2"}
GREETING = PREFACE + settings() + frame(SETTINGS, ACK)
