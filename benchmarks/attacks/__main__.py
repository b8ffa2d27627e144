"""``python -m benchmarks.attacks``: attacks a server of its own, or a running one, and prints a table.

stdout gets the table, stderr the progress. Exit 1: a limit was not held. ``scripts/attack`` calls it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.attacks.catalog import ATTACKS
from benchmarks.attacks.limits import Finding, Limits, keeps, markdown
from benchmarks.attacks.watched import Held, held
from benchmarks.peers import PeerCache
from benchmarks.servers.ours import GpuServe
from benchmarks.servers.running import running
from benchmarks.servers.server import ECHO, Ports

_LOOK_S: Final = 0.2
#: How long what was taken may be given back.
_SETTLE_S: Final = 10.0
#: A server that had as many descriptors in so many looks has what it needs.
_SAME_LOOKS: Final = 8
#: The largest bodies are made, and threads end, besides the attack itself.
_ATTACKER_EXTRA_S: Final = 30.0
#: So many times the memory that it may take: the machine is other people's as well.
_ENOUGH: Final = 8


class Server(NamedTuple):
    """Where the attacked server is, ``tls`` with TLS; with a pid of 0 its memory cannot be seen."""

    http: str
    grpc: str
    tls: str
    pid: int


class Attacked(GpuServe):
    """A server of our own, with the defaults of every setting, whose metrics port speaks TLS."""

    def __init__(self, folder: Path) -> None:
        super().__init__(PeerCache(folder))
        self._pair = folder / "certificate.pem", folder / "key.pem"

    def prepare(self) -> None:
        super().prepare()
        certificate, key = map(str, self._pair)
        request = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost")
        subprocess.run([*request, "-out", certificate, "-keyout", key], check=True, capture_output=True)

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        flags = zip(
            ("--tls-certfile", "--tls-keyfile", "--tls-ports"), (*self._pair, '["metrics"]'), strict=True
        )
        return [*super().command(ports, models), *(str(part) for flag in flags for part in flag)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, print, and say whether all limits were held."""
    given = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    limits = Limits(p99_ms=given.p99_ms)
    findings: list[Finding] = []
    while len(findings) < len(given.attacks):
        with _server(given) as server, Bystander(server) as bystander:
            _settle(server)
            for name in given.attacks[len(findings) :]:
                findings.append(attacked(server, bystander, name, given.seconds, limits))
                broken = findings[-1].broken(limits)
                print(f"{name}: {', '.join(broken) or 'held'}", file=sys.stderr, flush=True)
                if broken and not given.url:
                    break  # what it has left behind is no matter of the next one
    print(markdown(findings, limits), end="")
    return int(any(one.broken(limits) for one in findings))


class Bystander:
    """The well-behaved client, in a process of its own."""

    def __init__(self, server: Server) -> None:
        command = (sys.executable, "-m", "benchmarks.attacks.bystander", server.http, server.grpc)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Bystander:
        time.sleep(_LOOK_S)
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def take(self) -> tuple[list[float], dict[str, int]]:
        """Latencies, and errors by their text, since it was last asked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            sys.exit("the well-behaved client could not begin, or ended")
        seen = json.loads(line)
        return seen["latencies_s"], seen["errors"]


def attacked(server: Server, bystander: Bystander, name: str, seconds: float, limits: Limits) -> Finding:
    """One attack from its beginning until what it took is given back."""
    before = peak = after = _held(server)
    bystander.take()
    command = (sys.executable, "-m", "benchmarks.attacks.attacker", name, *server[:3], str(seconds))
    with subprocess.Popen(command) as attacker:
        try:
            end_s = time.monotonic() + seconds + _ATTACKER_EXTRA_S
            while attacker.poll() is None and time.monotonic() < end_s:
                time.sleep(_LOOK_S)
                peak = _highest(peak, _held(server))
                if peak and before and peak.nbytes - before.nbytes > _ENOUGH * limits.more_nbytes:
                    break
        finally:
            attacker.kill()
    latencies_s, errors = bystander.take()
    end_s = time.monotonic() + _SETTLE_S
    while (after := _held(server)) and before and keeps(before, after, limits) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return Finding(name, latencies_s, errors, before, peak, after)


def _settle(server: Server) -> None:
    """Wait until the server has all that it starts by itself after it is ready, as the process that waits
    until a door dies.
    """
    end_s = time.monotonic() + _SETTLE_S
    n_same, before = 0, _held(server)
    while before is not None and n_same < _SAME_LOOKS and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
        now = _held(server)
        n_same = n_same + 1 if now and now.descriptors == before.descriptors else 0
        before = now


def _held(server: Server) -> Held | None:
    return held(server.pid) if server.pid else None


def _highest(one: Held | None, other: Held | None) -> Held | None:
    return Held(*map(max, one, other)) if one and other else None


@contextlib.contextmanager
def _server(given: argparse.Namespace) -> Iterator[Server]:
    """The one that was named, or one of our own."""
    if given.url:
        http = given.url.removeprefix("http://").strip("/")
        yield Server(http, given.grpc or http, given.tls or http, given.pid)
        return
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        ours = Attacked(Path(folder))
        ours.prepare()
        with running(ours, Path(folder), (ECHO,)) as one:
            http, grpc, tls = (
                f"127.0.0.1:{one}" for one in (one.ports.http, one.ports.grpc, one.ports.metrics)
            )
            yield Server(http, grpc, tls, one.pid)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/attack",
        description="Attacks a server, one way after the other, and measures what a well-behaved client and\n"
        "the machine see of it. Exit status 1: a limit was not held.",
        epilog="\n".join(["attacks:", *(f"  {name:16}{attack.__doc__}" for name, attack in ATTACKS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--attacks", type=_names, default=list(ATTACKS), metavar="NAME,...", help="default: all of them"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each; default: %(default)g")
    parser.add_argument(
        "--p99-ms", type=float, default=Limits().p99_ms, help="of the client; default: %(default)g"
    )
    parser.add_argument(
        "--url", help="HTTP address of a running server with the model echo; default: one is started"
    )
    parser.add_argument("--grpc", metavar="HOST:PORT", help="its gRPC address; default: the same as --url")
    parser.add_argument("--tls", metavar="HOST:PORT", help="a port of it that speaks TLS")
    parser.add_argument("--pid", type=int, default=0, help="its supervisor, on this machine, for its memory")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ATTACKS]:
        raise argparse.ArgumentTypeError(f"expected names of attacks, given {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
