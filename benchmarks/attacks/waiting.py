"""Connections that hold something and do no more: idle ones, half requests, answers that nobody reads."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import ssl
import time
from typing import Final

from benchmarks.attacks.connections import (
    TIMEOUT_S,
    Address,
    Attack,
    Calls,
    Victim,
    attack_on,
    crowd,
    trusting_context,
)
from benchmarks.attacks.requests import (
    MIB,
    begin,
    body_frames,
    call_headers,
    data,
    framed,
    http_infer,
    message,
)
from gpuserve.cli.bench import http2_client as http2

_CROWD: Final = 100
_DRIP_S: Final = 0.25
_PING: Final = http2.frame(http2.PING, payload=bytes(8))
#: Left for the attacker's own files.
_SPARE_DESCRIPTORS: Final = 64
_MOST_IDLE: Final = 30_000
_STREAMS: Final = 2000
_N_ANSWERS: Final = 64
_NOTHING_READ_S: Final = 2.0


def none(victim: Victim) -> None:
    """Do nothing, and so show what the machine itself does to the client."""
    time.sleep(victim.left_s)


def _most_connections() -> int:
    """Return how many connections to hold, with as many descriptors as this process may have."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return min(most - _SPARE_DESCRIPTORS, _MOST_IDLE)


def idle(victim: Victim) -> None:
    """Connections that say nothing, until no more are taken or this client has no more descriptors."""
    held, most = list[socket.socket](), _most_connections()
    with contextlib.ExitStack() as stack:
        while victim.left_s > 0:
            if len(held) >= most:
                time.sleep(victim.left_s)
            try:
                held.append(stack.enter_context(socket.create_connection(victim.http, TIMEOUT_S)))
            except OSError:
                time.sleep(_DRIP_S)


def tls_stopped(victim: Victim) -> None:
    """Handshakes of TLS that begin and do not go on, as many connections as are taken."""
    hello = _client_hello()
    with contextlib.ExitStack() as stack:
        for _ in range(_most_connections()):
            if victim.left_s <= 0:
                return
            with contextlib.suppress(OSError):
                one = stack.enter_context(socket.create_connection(victim.tls, TIMEOUT_S))
                one.sendall(hello)
        time.sleep(max(0.0, victim.left_s))


def tls_handshakes(victim: Victim) -> None:
    """Whole handshakes of TLS, without a pause; then the connection is closed."""

    context = trusting_context()

    def talk() -> None:
        with socket.create_connection(victim.tls, TIMEOUT_S) as plain:
            context.wrap_socket(plain).close()

    crowd(victim, _CROWD, talk)


def _client_hello() -> bytes:
    """The first bytes of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    begun = trusting_context().wrap_bio(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        begun.do_handshake()
    return outgoing.read()


def _dripping(victim: Victim, first: bytes, piece: bytes, http2_port: bool = False) -> None:
    """Many connections, each with a beginning, and then a small piece now and then."""

    def talk(attack: Attack) -> None:
        attack.pour([first])
        attack.drip(piece, _DRIP_S)

    attack_on(victim, victim.grpc if http2_port else victim.http, _CROWD, talk)


def slow_heads(victim: Victim) -> None:
    """Heads that come byte by byte."""
    _dripping(victim, b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: ", b"y")


def slow_bodies(victim: Victim) -> None:
    """Bodies of a MiB that come byte by byte."""
    head, body = http_infer(MIB // 4, with_data=False)
    _dripping(victim, head + b"\r\n" + body, b"\0")


def half_requests(victim: Victim) -> None:
    """Thousands of calls on each connection whose bodies do not end."""
    start = framed(message(1000))[:-1]
    calls = b"".join(begin(one, call_headers()) + data(one, start) for one in range(1, 2 * _STREAMS, 2))
    _dripping(victim, http2.connection_preface({}) + calls, _PING, http2_port=True)


def open_streams(victim: Victim) -> None:
    """Streams of ModelStreamInfer that are opened and not used."""
    block = call_headers("ModelStreamInfer")
    calls = b"".join(begin(one, block) for one in range(1, 2 * _STREAMS, 2))
    _dripping(victim, http2.connection_preface({}) + calls, _PING, http2_port=True)


def large_heads(victim: Victim) -> None:
    """Thousands of requests with heads of 60 KB each, which are held as long as their bodies do not come."""
    field = b"\0\x01a\x7f" + b"\xe1\xd3\x03" + b"v" * 60_000

    def talk(attack: Attack) -> None:
        calls = (begin(one, call_headers() + field) for one in range(1, 2 * _STREAMS, 2))
        attack.pour(itertools.chain([http2.connection_preface({})], calls))
        attack.drip(_PING, _DRIP_S)

    attack_on(victim, victim.grpc, 8, talk)


def closed_windows(victim: Victim) -> None:
    """Answers of a MiB through windows of nothing, which grow by a byte every two seconds."""
    headers, body = call_headers(), framed(message(MIB // 4))

    def talk() -> None:
        with Calls(victim.grpc, headers, (body,), victim.until_s) as calls:
            calls.send(http2.settings_frame({http2.INITIAL_WINDOW: 0}))
            for _ in range(_N_ANSWERS):
                calls.begin()
            while victim.left_s > 0:
                until_s = time.monotonic() + _NOTHING_READ_S
                calls.run(lambda: time.monotonic() > until_s)  # noqa: B023 - it is over before the next
                calls.send(b"".join(http2.window_update(one, 1) for one in range(1, 2 * _N_ANSWERS, 2)))

    crowd(victim, 4, talk)


def unread_http2(victim: Victim) -> None:
    """Answers of a MiB over HTTP/2 to a client that does not read, but for a byte every few seconds."""
    body = framed(message(MIB // 4))
    calls = [begin(one, call_headers()) + body_frames(one, body) for one in range(1, 33, 2)]
    _unread(victim, http2.connection_preface({}) + b"".join(calls), victim.grpc)


def unread_http1(victim: Victim) -> None:
    """The same over HTTP/1, by requests that follow one another."""
    head, body = http_infer(MIB // 4)
    _unread(victim, (head + b"\r\n" + body) * 4, victim.http)


def unread_small(victim: Victim) -> None:
    """Small answers that nobody reads, by requests without a pause."""
    head, body = http_infer(2000)
    _unread(victim, (head + b"\r\n" + body) * 1000, victim.http)


def _unread(victim: Victim, sent: bytes, address: Address) -> None:
    def talk(attack: Attack) -> None:
        attack.pour([sent])
        while victim.left_s > 0:
            attack.idle(_NOTHING_READ_S)
            with contextlib.suppress(BlockingIOError):
                attack.socket.recv(1)

    attack_on(victim, address, 8, talk, reads=False)


ATTACKS: Final = (
    none, idle, tls_stopped, tls_handshakes, slow_heads, slow_bodies, half_requests, open_streams,
    large_heads, closed_windows, unread_http2, unread_http1, unread_small,
)  # fmt: skip
