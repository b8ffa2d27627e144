"""``python -m benchmarks.attacks.bystander HTTP GRPC``: a well-behaved client, from another address.

It asks for a small inference fifty times a second over one connection, every 25th of a MiB, and ten times a
second for the server's health over a new one, as a probe does. For each line on stdin it prints what it has
seen since the last; it ends with stdin. A latency counts from when the request was due.
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
from typing import Final

from benchmarks.attacks.attacker import address
from benchmarks.attacks.connections import TIMEOUT_S, Address, Calls
from benchmarks.attacks.requests import MIB, call_headers, framed, message
from gpuserve.bench.calls.call import ProtocolBroken

_INFER_S: Final = 0.02
_HEALTH_S: Final = 0.1
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

    def note(self, latency_s: float, error: str) -> None:
        """One request, with what was wrong of it."""
        with self._lock:
            self._latencies_s.append(latency_s)
            self._errors.update([error] if error else ())

    def take(self) -> str:
        """All of it as JSON, once."""
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
            raise Failed(f"inference: {error}") from error

    def _connected(self) -> Calls:
        return Calls(self._server, call_headers(), self._bodies, time.monotonic() + TIMEOUT_S, self._source)


def probe(server: Address, source: str) -> None:
    """Ask for the server's health as a kubelet does. Raises Failed: it is not ready, or says nothing."""
    connection = http.client.HTTPConnection(
        *server, timeout=TIMEOUT_S, source_address=(source, 0) if source else None
    )
    with contextlib.closing(connection):
        connection.request("GET", "/v2/health/ready")
        if (status := connection.getresponse().status) != http.HTTPStatus.OK:
            raise Failed(f"status {status}")


def steadily(ask: Callable[[], None], every_s: float, seen: Seen) -> None:
    """Ask at a steady pace, for ever; what was due while an answer was waited for is asked at once."""
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + every_s, time.monotonic() - TIMEOUT_S)
        time.sleep(max(0.0, due_s - time.monotonic()))
        error = ""
        try:
            ask()
        except (OSError, http.client.HTTPException, ProtocolBroken, Failed) as failure:
            error = str(failure) or type(failure).__name__
        seen.note(time.monotonic() - due_s, error)


def main(arguments: Sequence[str]) -> None:
    """Ask until stdin ends."""
    http_address, grpc_address = map(address, arguments)
    source = _SOURCE if http_address[0].startswith("127.") else ""
    seen = Seen()
    infer = Inference(grpc_address, source)
    infer()
    for ask, every_s in ((infer, _INFER_S), (lambda: probe(http_address, source), _HEALTH_S)):
        threading.Thread(target=steadily, args=(ask, every_s, seen), daemon=True).start()
    for _ in sys.stdin:
        print(seen.take(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
