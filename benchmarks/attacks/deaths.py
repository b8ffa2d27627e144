"""Attacks on processes, not on connections: deaths, descriptors used up, and mistakes of an operator."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.attacks.attacked import FEW_DESCRIPTORS, MORTAL, PLAIN, PLAIN_ECHO, attacked
from benchmarks.attacks.connections import TIMEOUT_S, Address, Victim, ask_on
from benchmarks.attacks.limits import Case, Judgement
from benchmarks.attacks.requests import MODEL, call_headers, framed, http_infer, message
from benchmarks.models.attacked import POISON

_TIMEOUT_S: Final = 30.0
#: How long a command that has to be refused may take.
_REFUSAL_S: Final = 10.0
#: Descriptors that the supervisor has left, up to this number: a reload fails at another place with each.
_MOST_SPARE: Final = 12
_GPUSERVE: Final = Path(sys.executable).parent / "gpuserve"
_DIGITS: Final = int("9" * 400)
_N_ENSEMBLES: Final = 2000
_ALIASES: Final = 9
#: Exit status of a command that failed; the documented ones are below.
_UNDOCUMENTED: Final = 7


class Done(NamedTuple):
    """A command that has ended: its exit status, what it has printed, and how long it took."""

    code: int
    output: str
    seconds: float


def operate(server: Address, verb: str, *arguments: str) -> Done:
    """Run a command for the server that listens there, and kill the command if it does not end."""
    began_s = time.monotonic()
    command = [str(_GPUSERVE), verb, "--server", f"{server[0]}:{server[1]}", *arguments]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Done(-9, "", _TIMEOUT_S)
    return Done(done.returncode, done.stdout, time.monotonic() - began_s)


def _reloads(victim: Victim, changes: Mapping[str, Callable[[dict[str, Any]], str]]) -> Iterator[Judgement]:
    """Reload each changed configuration, then the former one, as long as that can be reloaded."""
    victim.begin()
    for name, change in changes.items():
        yield _judged(f"reload with {name}", _reload_of(victim, change))
        after = _judged("reload of the former configuration", operate(victim.http, "reload"), is_fine=True)
        yield after
        yield _judged("status", operate(victim.http, "status"), is_fine=True)
        if not after.is_good:
            return


def _judged(name: str, done: Done, is_fine: bool = False, most_s: float = _TIMEOUT_S) -> Judgement:
    """Judge a command: it ends in time with a documented status, 0 if it is fine, and without a traceback."""
    is_documented = 0 <= done.code < _UNDOCUMENTED and "Traceback" not in done.output
    is_good = (done.code == 0 if is_fine else is_documented) and done.seconds < most_s
    said = "" if is_good else f": {done.output[-300:].strip()}"
    return Judgement(f"{name} ended after {done.seconds:.1f} s with {done.code}{said}", is_good)


def reload_digits(victim: Victim) -> Iterator[Judgement]:
    """Reload configurations with an integer of 400 digits."""

    def changed(where: str, key: str, document: dict[str, Any]) -> str:
        (document["server"] if where == "server" else document["models"][0])[key] = _DIGITS
        return json.dumps(document)

    keys = (("server", "drain_timeout_s"), ("server", "max_connections"), ("model", "execution_timeout_s"))
    return _reloads(victim, {f"400 digits in {key}": partial(changed, *(where, key)) for where, key in keys})


def reload_aliases(victim: Victim) -> Iterator[Judgement]:
    """Reload a configuration whose aliases of YAML stand for a thousand million texts."""

    def changed(document: dict[str, Any]) -> str:
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, _ALIASES)]
        return "\n".join([*lines, *(f"{key}: {json.dumps(value)}" for key, value in document.items())])

    def in_model(document: dict[str, Any]) -> str:
        return changed(document).replace('"callable"', f'"kwargs": {{"a": *a{_ALIASES - 1}}}, "callable"')

    return _reloads(victim, {"aliases": changed, "aliases in a model": in_model})


def reload_chain(victim: Victim) -> Iterator[Judgement]:
    """Reload a configuration with a chain of 2,000 ensembles."""

    def changed(document: dict[str, Any]) -> str:
        tensors = {key: PLAIN_ECHO[key] for key in ("inputs", "outputs", "max_batch_size")}
        for n in range(_N_ENSEMBLES):
            step = {"model": document["models"][-1]["name"], "inputs": {"x": "x"}, "outputs": {"y": "y"}}
            document["models"].append({"name": f"chain{n}", "ensemble": {"steps": [step]}, **tensors})
        return json.dumps(document)

    return _reloads(victim, {"2,000 ensembles": changed})


def reload_descriptors(victim: Victim) -> Iterator[Judgement]:
    """Reload a configuration with more instances while the supervisor has no descriptor left."""

    def changed(document: dict[str, Any]) -> str:
        document["models"][0]["instances"] = 3
        return json.dumps(document)

    victim.begin()
    before = resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
    for spare in range(_MOST_SPARE):
        n_open = len(os.listdir(f"/proc/{victim.pid}/fd"))
        resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (n_open + spare, before[1]))
        done = _reload_of(victim, changed)
        yield _judged(f"reload with {spare} descriptors left", done, most_s=_REFUSAL_S)
        resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, before)
    yield from _reloads(victim, {"descriptors again": changed})


def _reload_of(victim: Victim, change: Callable[[dict[str, Any]], str]) -> Done:
    config = Path(victim.config)
    good = config.read_text()
    config.write_text(change(json.loads(good)))
    done = operate(victim.http, "reload")
    config.write_text(good)
    return done


_STATUS_S: Final = 2.0
_STATUS_ROUNDS: Final = 3
_N_INGRESS: Final = 4
_DEATHS: Final = 5
_OUTAGE_RATIO: Final = 1.2
_RETRY_S: Final = 0.005
_RECOVERY_S: Final = 30.0
_N_KEPT: Final = 20
_SOURCES: Final = 8


def poison(victim: Victim) -> None:
    """Send requests that kill the worker of a model with one instance, again and again."""
    ask_on(victim, call_headers(), (framed(message(16, first=POISON)),), 2)


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
    for n_ingress in (1, _N_INGRESS):
        with (
            tempfile.TemporaryDirectory(prefix="attack-") as folder,
            attacked(Path(folder), PLAIN, n_ingress) as (one, _),
        ):
            address = "127.0.0.1", one.ports.http
            seconds, lost = zip(*(_death(address) for _ in range(_DEATHS)), strict=True)
        outages[n_ingress] = statistics.median(seconds)
        kept = f"{sum(lost)} of {_N_KEPT * _DEATHS} idle connections lost"
        outage = f"no answer for {outages[n_ingress]:.2f} s (median of {_DEATHS})"
        text = f"front killed, ingress processes {n_ingress}: {outage}, {kept}"
        yield Judgement(text, n_ingress == 1 or not any(lost))
    ratio = outages[_N_INGRESS] / outages[1]
    text = f"front killed: with {_N_INGRESS} ingress processes {ratio:.2f} times as long"
    yield Judgement(text, ratio <= _OUTAGE_RATIO)


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
    **{
        attack.__name__.replace("_", "-"): Case(attack, by_operator=True)
        for attack in (reload_digits, reload_aliases, reload_chain, reload_descriptors)
    },
}
