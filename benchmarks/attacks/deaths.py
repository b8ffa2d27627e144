"""Deaths of processes, and descriptors used up: attacks on the server's processes, not on its connections."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.attacks.attacked import FEW_DESCRIPTORS, MORTAL, PLAIN, attacked
from benchmarks.attacks.cases import Case, Judgement
from benchmarks.attacks.connections import TIMEOUT_S, Address, Calls, Victim, crowd
from benchmarks.attacks.operator import operate
from benchmarks.attacks.requests import MODEL, call_headers, framed, http_infer, message
from benchmarks.models.attacked import POISON

_STATUS_S: Final = 2.0
_STATUS_ROUNDS: Final = 3
_DOORS: Final = 4
_DEATHS: Final = 5
_OUTAGE_RATIO: Final = 1.2
_RETRY_S: Final = 0.005
_RECOVERY_S: Final = 30.0
_N_KEPT: Final = 20
_SOURCES: Final = 8


def poison(victim: Victim) -> None:
    """Send requests that kill the worker of a model with one instance, again and again."""
    body = framed(message(16, first=POISON))

    def talk() -> None:
        with Calls(victim.grpc, call_headers(), (body,), victim.until_s) as calls:
            while victim.left_s > 0:
                calls.begin()
                calls.answer()

    crowd(victim, 2, talk)


def descriptors(victim: Victim) -> Iterator[Judgement]:
    """Connect from several addresses to all ports, until the server has no descriptor left."""
    health = "127.0.0.1", json.loads(Path(victim.config).read_text())["server"]["health_port"]
    ports = itertools.cycle((victim.http, victim.grpc, victim.tls, health))
    sources = itertools.cycle(f"127.0.0.{one}" for one in range(3, 3 + _SOURCES))
    victim.begin()
    with contextlib.ExitStack() as stack:
        for port, source, _ in zip(ports, sources, range(4 * FEW_DESCRIPTORS.descriptors), strict=False):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(port, 0.2, (source, 0)))
        done = [operate(victim.http, "status") for _ in range(_STATUS_ROUNDS)]
        seconds = statistics.median(one.seconds for one in done)
        codes = [one.code for one in done]
        text = f"gpuserve status ended after {seconds:.2f} s (median of {len(done)}) with {codes}"
        yield Judgement(text, seconds < _STATUS_S and not any(codes))
        time.sleep(max(0.0, victim.left_s))


def front_deaths(victim: Victim) -> Iterator[Judgement]:
    """Kill the front process of a server without and of one with four ingress processes."""
    victim.begin()
    outages = {}
    for doors in (1, _DOORS):
        with (
            tempfile.TemporaryDirectory(prefix="attack-") as folder,
            attacked(Path(folder), PLAIN, doors) as (one, _),
        ):
            address = "127.0.0.1", one.ports.http
            seconds, lost = zip(*(_death(address) for _ in range(_DEATHS)), strict=True)
        outages[doors] = statistics.median(seconds)
        kept = f"{sum(lost)} of {_N_KEPT * _DEATHS} idle connections lost"
        text = (
            f"front killed, doors {doors}: no answer for {outages[doors]:.2f} s (median of {_DEATHS}), {kept}"
        )
        yield Judgement(text, doors == 1 or not any(lost))
    ratio = outages[_DOORS] / outages[1]
    yield Judgement(f"front killed: with {_DOORS} doors {ratio:.2f} times as long", ratio <= _OUTAGE_RATIO)


def _death(address: Address) -> tuple[float, int]:
    """Kill the front; return for how long no request was answered, and how many connections were lost."""
    idle = [http.client.HTTPConnection(*address, timeout=TIMEOUT_S) for _ in range(_N_KEPT)]
    for one in idle:
        _ask(one)
        one.auto_open = 0  # a lost connection is not opened again
    status = json.loads(operate(address, "status", "--json").output)
    os.kill(status["server"]["front"]["pid"], signal.SIGKILL)
    killed_s = time.monotonic()
    while not _answers(http.client.HTTPConnection(*address, timeout=TIMEOUT_S)):
        if time.monotonic() > killed_s + _RECOVERY_S:
            break
        time.sleep(_RETRY_S)
    outage_s = time.monotonic() - killed_s
    return outage_s, sum(not _answers(one) for one in idle)


def _answers(connection: http.client.HTTPConnection) -> bool:
    with contextlib.closing(connection):
        try:
            _ask(connection)
        except (OSError, http.client.HTTPException):
            return False
    return True


def _ask(connection: http.client.HTTPConnection) -> None:
    head, body = http_infer(4)
    sizes = dict(line.split(": ") for line in head.decode().splitlines()[1:])
    connection.request("POST", f"/v2/models/{MODEL}/infer", body, sizes)
    response = connection.getresponse()
    response.read()
    if response.status != http.HTTPStatus.OK:
        raise ConnectionError(f"status {response.status}")


CASES: Final = {
    "poison": Case(poison, MORTAL, p99_ms=5000.0, least_s=20.0),
    "descriptors": Case(descriptors, FEW_DESCRIPTORS),
    # The client beside it asks another server, which waits for the machine while servers start.
    "front-deaths": Case(front_deaths, p99_ms=5000.0, by_operator=True),
}
