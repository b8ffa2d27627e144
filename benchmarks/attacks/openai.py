"""Requests of OpenAI's clients that are costly to read, to answer, or to search for stop sequences."""

from __future__ import annotations

import json
from typing import Final

from benchmarks.attacks.attacked import OPENAI, OPENAI_ASKED
from benchmarks.attacks.bodies import post
from benchmarks.attacks.cases import Case
from benchmarks.attacks.connections import Victim
from benchmarks.attacks.requests import MIB, http_post

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
    "openai-json": Case(openai_json, OPENAI),
    "openai-json-none": Case(openai_json),
    "openai-echo": Case(openai_echo, OPENAI),
    "stop-strings": Case(stop_strings, OPENAI_ASKED),
}
