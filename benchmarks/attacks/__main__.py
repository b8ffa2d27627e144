"""``python -m benchmarks.attacks``: attacks servers of its own, or a running one, and prints a table.

stdout gets the table, stderr the progress. Exit status 1: a limit was not held. Exit status 2: this machine
refuses the control group. ``scripts/attack`` calls this module.
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
from typing import Final

from benchmarks.attacks.attacked import PLAIN, Held, Setting, attacked, held, held_by_requests
from benchmarks.attacks.attacker import ATTACKS
from benchmarks.attacks.connections import Victim, address
from benchmarks.attacks.limits import Finding, Judgement, Limits, compared, keeps, markdown
from benchmarks.command_line import exit_on_sigterm, names_of, say
from benchmarks.processes import Group, cpu_group

_LOOK_S: Final = 0.2
#: How long the server has to give back what it took. First it works through all that the attacker has sent,
#: which takes more memory: the streams that lie in 100 sockets take it 1 to 2 s on a free core.
_GIVE_BACK_S: Final = 40.0
#: How long the well-behaved client is watched when an attack is over; it asks for a MiB meanwhile.
_AFTERWARDS_S: Final = 1.2
#: How long a server may take for what it starts by itself after it is ready.
_START_S: Final = 10.0
#: A server that had as many descriptors in so many looks has what it needs.
_SAME_LOOKS: Final = 8
#: The largest bodies are made, and threads end, besides the attack itself.
_ATTACKER_EXTRA_S: Final = 30.0
#: An operator's commands take their time.
_OPERATOR_EXTRA_S: Final = 400.0
#: So many times the memory that it may take: the machine is other people's as well.
_ENOUGH: Final = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, print, and say whether all limits were held."""
    given = _parse(arguments)
    exit_on_sigterm()
    findings: list[Finding] = []
    with contextlib.ExitStack() as stack:
        group = None
        if given.cpu:
            try:
                group = stack.enter_context(cpu_group(given.cpu))
            except OSError as error:
                say(f"This machine does not allow a control group of {given.cpu:g} CPU: {error}")
                return 2
        while len(findings) < len(given.attacks):
            _attack_one_server(given, group, findings)
    print(markdown(findings), end="")
    if given.compare:
        print("\n" + compared(findings, json.loads(given.compare.read_text())), end="")
    if given.json:
        given.json.write_text(json.dumps([one.document for one in findings], indent=1) + "\n")
    return int(any(one.broken for one in findings))


def _attack_one_server(given: argparse.Namespace, group: Group | None, findings: list[Finding]) -> None:
    """Attack one server until an attack needs another configuration, or has broken a limit."""
    names = given.attacks[len(findings) :]
    setting = ATTACKS[names[0]].setting
    with _server(given, setting, group) as server, Bystander(server, setting) as bystander:
        _settle(server)
        for name in names:
            if ATTACKS[name].setting is not setting:
                return
            # With a part of a CPU a request may take longer by as much.
            p99_ms = (ATTACKS[name].p99_ms or given.p99_ms) / min(1.0, given.cpu or 1.0)
            finding = _attacked(server, bystander, name, given.seconds, Limits(p99_ms=p99_ms))
            findings.append(finding)
            say(f"{name}: {', '.join(finding.broken) or 'held'}")
            if finding.broken and not given.url:
                return


class Bystander:
    """The well-behaved client, in a process of its own."""

    def __init__(self, server: Victim, setting: Setting) -> None:
        addresses = (f"{host}:{port}" for host, port in (server.http, server.grpc))
        command = (sys.executable, "-m", "benchmarks.attacks.bystander", *addresses, str(setting.patience_s))
        self._process = subprocess.Popen(
            (*command, *setting.asks), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Bystander:
        time.sleep(_LOOK_S)
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def take(self) -> tuple[list[float], dict[str, int]]:
        """Return latencies, and errors by their text, since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            sys.exit("the well-behaved client could not begin, or ended")
        seen = json.loads(line)
        return seen["latencies_s"], seen["errors"]


def _attacked(server: Victim, bystander: Bystander, name: str, seconds: float, limits: Limits) -> Finding:
    """Attack in one way, and watch the server until what the attack took is given back."""
    case = ATTACKS[name]
    seconds = max(seconds, case.least_s)
    before = peak = after = _held(server)
    where = (server.http, server.grpc, server.tls, server.pid, server.config, seconds)
    command = (sys.executable, "-m", "benchmarks.attacks.attacker", name, json.dumps(where))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()
        bystander.take()
        began_s = time.monotonic()
        try:
            end_s = began_s + seconds + (_OPERATOR_EXTRA_S if case.by_operator else _ATTACKER_EXTRA_S)
            while attacker.poll() is None and time.monotonic() < end_s:
                time.sleep(_LOOK_S)
                peak = _highest(peak, _held(server))
                if peak and before and peak.nbytes - before.nbytes > _ENOUGH * limits.more_nbytes:
                    break
        finally:
            attacker.kill()
        judgements = [Judgement(*json.loads(line)) for line in attacker.stdout]
    watched_s = time.monotonic() - began_s
    if attacker.returncode and attacker.returncode != -signal.SIGKILL:
        judgements.append(Judgement(f"the attacker ended with {attacker.returncode}", is_good=False))
    latencies_s, errors = bystander.take()
    end_s = time.monotonic() + _GIVE_BACK_S
    while (after := _held(server)) and before and time.monotonic() < end_s:
        peak = _highest(peak, after)
        if not keeps(before, after, limits) and not _held_by_requests(server):
            break
        time.sleep(_LOOK_S)
    bystander.take()
    time.sleep(_AFTERWARDS_S)
    afterwards = {f"afterwards: {text}": n for text, n in bystander.take()[1].items()}
    requests_held = min(_held_by_requests(server) for _ in range(_SAME_LOOKS))
    return Finding(
        *(name, watched_s, limits, latencies_s, {**errors, **afterwards}),
        *(before, peak, after, requests_held, judgements),
    )


def _settle(server: Victim) -> None:
    """Wait until the server has all that it starts by itself after it is ready, such as spare processes."""
    end_s = time.monotonic() + _START_S
    n_same, before = 0, _held(server)
    while before is not None and n_same < _SAME_LOOKS and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
        now = _held(server)
        n_same = n_same + 1 if now and now.descriptors == before.descriptors else 0
        before = now


def _held(server: Victim) -> Held | None:
    return held(server.pid) if server.pid else None


def _held_by_requests(server: Victim) -> int:
    """Return what requests hold; 0 for a server whose metrics cannot be seen, or that does not answer."""
    if not server.config:
        return 0
    with contextlib.suppress(OSError):
        return held_by_requests(f"{server.tls[0]}:{server.tls[1]}")
    return 0


def _highest(one: Held | None, other: Held | None) -> Held | None:
    return Held(*map(max, one, other)) if one and other else None


@contextlib.contextmanager
def _server(given: argparse.Namespace, setting: Setting, group: Group | None) -> Iterator[Victim]:
    """Give the server that was named, or start one."""
    if given.url:
        http = given.url.removeprefix("http://").strip("/")
        yield Victim(*map(address, (http, given.grpc or http, given.tls or http)), given.pid)
        return
    with (
        tempfile.TemporaryDirectory(prefix="attack-") as folder,
        attacked(Path(folder), setting, given.ingress_processes, group) as (one, config),
    ):
        ports = (one.ports.http, one.ports.grpc, one.ports.metrics)
        yield Victim(*(("127.0.0.1", port) for port in ports), one.pid, str(config))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/attack",
        description="Attacks a server, one way after the other, and measures what a well-behaved client and\n"
        "the machine see of it. Exit status 1: a limit was not held.",
        epilog="\n".join(
            ["attacks:", *(f"  {name:20}{one.attack.__doc__}" for name, one in ATTACKS.items())]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    p99_ms = Limits().p99_ms
    add("--attacks", type=names_of(ATTACKS), metavar="NAME,...", help="default: all of them")
    add("--seconds", type=float, default=10.0, help="of each; default: %(default)g")
    add("--p99-ms", type=float, default=p99_ms, help="of the client; default: %(default)g")
    add("--ingress-processes", type=int, default=1, metavar="N", help="ingress processes; default: 1, none")
    cpus = "CPUs of the server, by a control group; below 1, limits of p99 are divided by it"
    add("--cpu", type=float, default=0.0, metavar="N", help=cpus)
    add("--json", type=Path, metavar="FILE", help="write the results there as well")
    add("--compare", type=Path, metavar="FILE", help="print earlier results of --json beside these")
    add("--url", help="HTTP address of a running server with the model echo; default: servers are started")
    add("--grpc", metavar="HOST:PORT", help="its gRPC address; default: the same as --url")
    add("--tls", metavar="HOST:PORT", help="a port of it that speaks TLS")
    add("--pid", type=int, default=0, help="its supervisor, on this machine, for its memory")
    given = parser.parse_args(arguments)
    remote = [name for name, one in ATTACKS.items() if one.setting is PLAIN and not one.by_operator]
    possible = remote if given.url else list(ATTACKS)
    given.attacks = given.attacks or possible
    if wrong := [name for name in given.attacks if name not in possible]:
        parser.error(f"a server of --url cannot be attacked by {', '.join(wrong)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
