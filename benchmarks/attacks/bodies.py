"""Bodies: claims of what never comes, small ones that are large when they are unpacked, and large ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import count, cycle
from typing import Final

from benchmarks.attacks.attacked import OPENAI, OPENAI_ASKED, SMALL_ARENA
from benchmarks.attacks.connections import Address, Attack, Victim, ask_on, attack_on
from benchmarks.attacks.limits import Case
from benchmarks.attacks.requests import (
    MIB,
    MODEL,
    begin,
    body_frames,
    bomb,
    call_headers,
    claim,
    data,
    field,
    framed,
    http_claim,
    http_infer,
    http_post,
    message,
    typed_message,
)
from gpuserve.cli.bench import http2_client as http2

_CLAIMS: Final = 200
_BOMB_NBYTES: Final = 1 << 30
_LARGE_NBYTES: Final = 100 * MIB
_PAUSE_S: Final = 0.005
_TYPED_NBYTES: Final = 30 * MIB
_ZIPPED: Final = (("grpc-encoding", "gzip"),)


def claims_grpc(victim: Victim) -> None:
    """Messages whose first bytes say that a GiB follows."""
    calls = b"".join(begin(one, call_headers()) + data(one, claim()) for one in range(1, 2 * _CLAIMS, 2))
    _hold(victim, victim.grpc, http2.connection_preface({}) + calls, 4)


def claims_http(victim: Victim) -> None:
    """Bodies over HTTP whose head says that a GiB follows."""
    _hold(victim, victim.http, http_claim(), _CLAIMS)


def _hold(victim: Victim, address: Address, sent: bytes, n: int) -> None:
    def talk(attack: Attack) -> None:
        attack.pour([sent])
        attack.idle(victim.left_s)

    attack_on(victim, address, n, talk)


def bombs_unary(victim: Victim) -> None:
    """Messages of a MiB that unpack to a GiB."""
    _bombs(victim, "ModelInfer", 1)


def bombs_stream(victim: Victim) -> None:
    """The same, several in each stream."""
    _bombs(victim, "ModelStreamInfer", 4)


def _bombs(victim: Victim, method: str, n: int) -> None:
    start = message(_BOMB_NBYTES // 4, with_data=False) + b"\x3a\x80\x80\x80\x80\x04"
    body = framed(bomb(_BOMB_NBYTES, start), compressed=True) * n
    ask_on(victim, call_headers(method, _ZIPPED), (body,), 4)


def bombs_http(victim: Victim) -> None:
    """The same over HTTP."""
    head, document = http_infer(_BOMB_NBYTES // 4, with_data=False)
    body = bomb(_BOMB_NBYTES, document)
    kept = head.partition(b"\nContent-Length: ")[0] + b"\n"
    more = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    _hold(victim, victim.http, kept + more + body, 4)


def typed_contents(victim: Victim) -> None:
    """Send messages of 30 MiB of integers, of empty strings and of floats, not as raw bytes."""
    ask_on(victim, call_headers(), tuple(map(framed, _typed())), 4)


def typed_contents_gzip(victim: Victim) -> None:
    """Send the same in some 130 KB of gzip each."""
    bodies = tuple(framed(gzip.compress(one, 1), compressed=True) for one in _typed())
    ask_on(victim, call_headers(more=_ZIPPED), bodies, 4)


def _typed() -> tuple[bytes, ...]:
    zeros = bytes(_TYPED_NBYTES)
    return (
        typed_message("INT32", _TYPED_NBYTES, field(2, zeros)),
        typed_message("BYTES", _TYPED_NBYTES // 2, field(8, b"") * (_TYPED_NBYTES // 2)),
        typed_message("FP32", _TYPED_NBYTES // 4, field(6, zeros)),
    )


def late_bodies(victim: Victim) -> None:
    """Send tensors whose last bytes come after the deadline, beside calls with short deadlines."""
    bodies = [framed(message(n)) for n in (20_000, 75_000)]

    def talk(attack: Attack) -> None:
        attack.pour([http2.connection_preface({})])
        for n, body in zip(count(), cycle(bodies)):
            if victim.left_s <= 0:
                return
            late, soon, timeout_ms = 4 * n + 1, 4 * n + 3, n % 30 + 1
            headers = call_headers(more=[("grpc-timeout", f"{timeout_ms}m")])
            attack.pour([begin(late, headers) + body_frames(late, body[:-1], end=False)])
            attack.idle(timeout_ms / 1e3)
            next_call = begin(soon, headers) + body_frames(soon, bodies[0])
            attack.pour([data(late, body[-1:], end=True), next_call])
            attack.idle(_PAUSE_S)

    attack_on(victim, victim.grpc, 6, talk)


def large_bodies(victim: Victim) -> None:
    """Twelve requests of 100 MiB at once, all of them right, again and again."""
    ask_on(victim, call_headers(), (framed(message(_LARGE_NBYTES // 4)),), 12)


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
    post(victim, [http_post(f"/v2/models/{MODEL}/infer", body)])


def post(victim: Victim, requests: Sequence[bytes]) -> None:
    """Send these requests over HTTP/1.1 again and again, on four connections."""
    attack_on(victim, victim.http, 4, lambda attack: attack.pour(cycle(requests)))


ATTACKS: Final = (
    json_numbers, json_values, claims_grpc, claims_http, bombs_unary, bombs_stream, bombs_http,
    large_bodies, typed_contents, typed_contents_gzip,
)  # fmt: skip


_MODEL: Final = "talker"
#: Just under the limit of such bodies.
_JSON_NBYTES: Final = 32 * MIB - 4096
_LETTERS: Final = 200_000
_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def openai_json(victim: Victim) -> None:
    """Post documents of 32 MiB of small values to each of OpenAI's paths, with and without a model."""
    requests = []
    for path, member, element in (
        (_CHAT, b"messages", b"{}"),
        (_COMPLETIONS, b"prompt", b"[1]"),
        (_EMBEDDINGS, b"input", b"1"),
        (_CHAT, b"more", b'{"a":0}'),
    ):
        values = b",".join([element] * (_JSON_NBYTES // (len(element) + 1)))
        requests.append(http_post(path, b'{"model":"%b","%b":[%b]}' % (_MODEL.encode(), member, values)))
    post(victim, requests)


def openai_echo(victim: Victim) -> None:
    """Ask for completions that repeat a prompt of 4 MiB 128 times."""
    asked = {"model": _MODEL, "prompt": "a" * (4 * MIB), "echo": True, "n": 128}
    post(victim, [http_post(_COMPLETIONS, json.dumps(asked).encode())])


def stop_strings(victim: Victim) -> None:
    """Ask for 200,000 letters, in one token or in as many, with 16 stop sequences like them."""
    requests = []
    for prompt, tokens, n_letters in (("ab" * (_LETTERS // 2), 1, _LETTERS), ("a", _LETTERS, 2000)):
        stop = ["a" * (n_letters - one) + "c" for one in range(16)]
        asked = {"model": _MODEL, "prompt": prompt, "max_tokens": tokens, "stop": stop}
        requests.append(http_post(_COMPLETIONS, json.dumps(asked).encode()))
    post(victim, requests)


CASES: Final = {
    "late-bodies": Case(late_bodies, SMALL_ARENA),
    "openai-json": Case(openai_json, OPENAI),
    "openai-json-none": Case(openai_json),
    "openai-echo": Case(openai_echo, OPENAI),
    "stop-strings": Case(stop_strings, OPENAI_ASKED),
}
