"""``python -m benchmarks.attacks.bystander HTTP GRPC PATIENCE_S ASK...``: a well-behaved client, from another
address. What it asks for:

- ``inference``: a small inference fifty times a second over one connection, every 25th of a MiB;
- ``health``: the server's health ten times a second, each over a new connection, as a probe does;
- ``completion``: a completion of OpenAI of one token ten times a second, each over a new connection.

For each line on stdin the client waits some seconds until all requests that were due are answered, and prints
what it has seen since the last line; the client ends with stdin. A latency counts from when the request was
due. A client with patience asks again after an error, and its latency counts until the good answer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from benchmarks.attacks.connections import TIMEOUT_S, Address, Calls, address
from benchmarks.attacks.requests import MIB, call_headers, framed, message
from gpuserve.cli.bench.load_generator import ProtocolError

_INFER_S: Final = 0.02
_SELDOM_S: Final = 0.1
_AGAIN_S: Final = 0.02
#: How long the answers to requests that were due are waited for.
_LAST_ANSWERS_S: Final = 15.0
_EVERY_LARGE: Final = 25
_BODIES: Final = 16, MIB // 4
#: On the loopback all of 127/8 is this machine; the attacker has the first of them.
_SOURCE: Final = "127.0.0.2"


class Failed(Exception):
    """A request of the well-behaved client was not answered well; the text says how."""


class Seen:
    """What the client has seen since it was last asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latencies_s: list[float] = []
        self._errors: Counter[str] = Counter()
        self._due_s: dict[str, float] = {}

    def due(self, kind: str, due_s: float) -> None:
        """Note when the next request of this kind is due, and so that all before are noted."""
        self._due_s[kind] = due_s

    def note(self, latency_s: float, error: str) -> None:
        with self._lock:
            self._latencies_s.append(latency_s)
            self._errors.update([error] if error else ())

    def take(self) -> str:
        """Return what was due until now, as JSON, once. A request without an answer counts as an error."""
        now_s = time.monotonic()
        while min(self._due_s.values()) <= now_s and time.monotonic() < now_s + _LAST_ANSWERS_S:
            time.sleep(_INFER_S)
        for kind, due_s in list(self._due_s.items()):
            if due_s <= now_s:
                self.note(time.monotonic() - due_s, f"{kind}: no answer")
        with self._lock:
            text = json.dumps({"latencies_s": self._latencies_s, "errors": self._errors})
            self._latencies_s, self._errors = [], Counter()
        return text


class Inference:
    """Calls over one connection, which is opened again when it is lost."""

    def __init__(self, server: Address, source: str) -> None:
        self._server = server
        self._source = source
        self._bodies = tuple(framed(message(n)) for n in _BODIES)
        self._calls: Calls | None = None
        self._n = 0

    def __call__(self) -> None:
        """One inference. Raises Failed: it did not go well."""
        self._n += 1
        try:
            calls = self._calls = self._calls or self._connected()
            calls.until_s = time.monotonic() + TIMEOUT_S
            calls.begin(self._n % _EVERY_LARGE == 0)
            if not calls.answer():
                raise Failed("no answer in time")
            if calls.failures:
                raise Failed(str(calls.failures.pop()))
        except Exception as error:
            if self._calls is not None:
                self._calls.close()
            self._calls = None
            raise Failed(str(error) or type(error).__name__) from error

    def _connected(self) -> Calls:
        return Calls(self._server, call_headers(), self._bodies, time.monotonic() + TIMEOUT_S, self._source)


def ask_http(server: Address, source: str, method: str, path: str, body: bytes = b"") -> None:
    """Ask over a connection of its own. Raises Failed: the answer is no success."""
    connection = http.client.HTTPConnection(
        *server, timeout=TIMEOUT_S, source_address=(source, 0) if source else None
    )
    with contextlib.closing(connection):
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        response.read()
        if response.status != http.HTTPStatus.OK:
            raise Failed(f"{path}: status {response.status}")


def steadily(kind: str, ask: Callable[[], None], every_s: float, patience_s: float, seen: Seen) -> None:
    """Ask at a steady pace, for ever; what was due while an answer was waited for is asked at once."""
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + every_s, time.monotonic() - TIMEOUT_S)
        seen.due(kind, due_s)
        time.sleep(max(0.0, due_s - time.monotonic()))
        while True:
            error = ""
            try:
                ask()
            except (OSError, http.client.HTTPException, ProtocolError, Failed) as failure:
                error = f"{kind}: {failure or type(failure).__name__}"
            if not error or time.monotonic() - due_s >= patience_s:
                break
            time.sleep(_AGAIN_S)
        seen.note(time.monotonic() - due_s, error)


def main(arguments: Sequence[str]) -> None:
    http_address, grpc_address = map(address, arguments[:2])
    source = _SOURCE if http_address[0].startswith("127.") else ""
    seen = Seen()
    completion = json.dumps({"model": "talker", "prompt": "a"}).encode()
    asks: dict[str, tuple[Callable[[], None], float]] = {
        "inference": (Inference(grpc_address, source), _INFER_S),
        "health": (partial(ask_http, http_address, source, "GET", "/v2/health/ready"), _SELDOM_S),
        "completion": (
            partial(ask_http, http_address, source, "POST", "/v1/completions", completion),
            _SELDOM_S,
        ),
    }
    for kind in arguments[3:]:
        ask, every_s = asks[kind]
        ask()
        seen.due(kind, time.monotonic())
        more = (kind, ask, every_s, float(arguments[2]), seen)
        threading.Thread(target=steadily, args=more, daemon=True).start()
    for _ in sys.stdin:
        print(seen.take(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
