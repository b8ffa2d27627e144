"""Bodies: claims of what never comes, small ones that are large when they are unpacked, and large ones."""

from __future__ import annotations

from itertools import repeat
from typing import Final

from benchmarks.attacks.connections import Attack, Calls, Victim, crowd
from benchmarks.attacks.requests import (
    MIB,
    begin,
    bomb,
    call_headers,
    claim,
    data,
    framed,
    http_claim,
    http_infer,
    message,
)
from gpuserve.bench.calls import http2

_CLAIMS: Final = 200
_BOMB_NBYTES: Final = 1 << 30
_LARGE_NBYTES: Final = 100 * MIB
_ZIPPED: Final = (("grpc-encoding", "gzip"),)


def claims_grpc(victim: Victim) -> None:
    """Messages whose first bytes say that a GiB follows."""
    calls = b"".join(begin(one, call_headers()) + data(one, claim()) for one in range(1, 2 * _CLAIMS, 2))
    _hold(victim, victim.grpc, http2.opening({}) + calls, 4)


def claims_http(victim: Victim) -> None:
    """Bodies over HTTP whose head says that a GiB follows."""
    _hold(victim, victim.http, http_claim(), _CLAIMS)


def _hold(victim: Victim, address: tuple[str, int], sent: bytes, n: int) -> None:
    def talk() -> None:
        with Attack(address, victim) as attack:
            attack.pour([sent])
            attack.idle(victim.left_s)

    crowd(victim, n, talk)


def bombs_unary(victim: Victim) -> None:
    """Messages of a MiB that unpack to a GiB."""
    _bombs(victim, "ModelInfer", 1)


def bombs_stream(victim: Victim) -> None:
    """The same, several in each stream."""
    _bombs(victim, "ModelStreamInfer", 4)


def _bombs(victim: Victim, method: str, n: int) -> None:
    start = message(_BOMB_NBYTES // 4, with_data=False) + b"\x3a\x80\x80\x80\x80\x04"
    body = framed(bomb(_BOMB_NBYTES, start), compressed=True) * n
    _ask(victim, call_headers(method, _ZIPPED), body, 4)


def _ask(victim: Victim, headers: bytes, body: bytes, n: int) -> None:
    def talk() -> None:
        with Calls(victim.grpc, headers, (body,), victim.until_s) as calls:
            while victim.left_s > 0:
                calls.begin()
                calls.answer()

    crowd(victim, n, talk)


def bombs_http(victim: Victim) -> None:
    """The same over HTTP."""
    head, document = http_infer(_BOMB_NBYTES // 4, with_data=False)
    body = bomb(_BOMB_NBYTES, document)
    kept = head.partition(b"\nContent-Length: ")[0] + b"\n"
    more = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)

    def talk() -> None:
        with Attack(victim.http, victim) as attack:
            attack.pour([kept + more + body])
            attack.idle(victim.left_s)

    crowd(victim, 4, talk)


def large_bodies(victim: Victim) -> None:
    """Twelve requests of 100 MiB at once, all of them right, again and again."""
    _ask(victim, call_headers(), framed(message(_LARGE_NBYTES // 4)), 12)


def json_numbers(victim: Victim) -> None:
    """Right requests of 48 MiB of numbers in JSON."""
    n = 4 * MIB
    _json(
        victim, b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],"data":[%b]}]}', n, b"0.123456789"
    )


def json_values(victim: Victim) -> None:
    """The same of short texts, which no array of numbers is."""
    n = 12 * MIB
    _json(victim, b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1,%d],"data":[%b]}]}', n, b'"a"')


def _json(victim: Victim, document: bytes, n: int, element: bytes) -> None:
    body = document % (n, b",".join([element] * n))
    head = http_infer(1)[0].partition(b"Inference-Header")[0]
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def talk() -> None:
        with Attack(victim.http, victim) as attack:
            attack.pour(repeat(request))

    crowd(victim, 4, talk)


ATTACKS: Final = {
    "json-numbers": json_numbers,
    "json-values": json_values,
    "claims-grpc": claims_grpc,
    "claims-http": claims_http,
    "bombs-unary": bombs_unary,
    "bombs-stream": bombs_stream,
    "bombs-http": bombs_http,
    "large-bodies": large_bodies,
}
