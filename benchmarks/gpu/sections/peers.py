"""The transformer encoder in a bare loop, in PyTriton and in Triton's Python backend, where they are
installed, side by side with ours: the same batches over gRPC, each with the GPU to itself in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import grpc

from benchmarks.gpu.running.section import Findings, SectionFailed, Site, ratio_figure
from benchmarks.gpu.served.client import with_bytes
from benchmarks.gpu.served.load import LoadClients, load_clients
from benchmarks.gpu.served.serving import (
    IN_FLIGHT,
    BareLoop,
    GpuPyTriton,
    GpuTriton,
    check_answer,
    network_model,
    networks_module,
    serving,
)
from benchmarks.peers import ServerMissing
from benchmarks.servers.server import RunningServer, Server, ServerFailed, running

_KIND: Final = "encoder"
_BATCHES: Final = (1, 8, 32)
_SMALL_BATCHES: Final = (1, 4)
#: One that cannot be had must not take the time of the others.
_READY_TIMEOUT_S: Final = 40.0
_OURS: Final = "gpuserve"
_LOOP: Final = "bare loop"


def run(site: Site, findings: Findings) -> None:
    networks = networks_module()
    loop = BareLoop(site, _KIND)
    shape = networks.TOKENS, networks.ENCODER_FEATURES
    with ExitStack() as stack:
        servers = {_OURS: stack.enter_context(serving(site, "peers", [network_model(site, _KIND, _KIND)]))}
        for peer in (GpuPyTriton(site), GpuTriton(site, _KIND, shape)):
            if one := _started(site, findings, stack, peer, loop):
                servers[peer.title] = one
        clients = stack.enter_context(load_clients(findings))
        for rows in _SMALL_BATCHES if site.stand_in else _BATCHES:
            check_answer(servers[_OURS], loop, loop.example(rows))
            _compare(site, findings, list(_turns(site, servers, clients, loop, rows)), rows)


def _started(
    site: Site, findings: Findings, stack: ExitStack, peer: Server, loop: BareLoop
) -> RunningServer | None:
    try:
        peer.prepare()
        one = stack.enter_context(running(peer, site.folder / peer.name, [_KIND], _READY_TIMEOUT_S))
        check_answer(one, loop, loop.example(1))
        return one
    except (ServerMissing, ServerFailed, SectionFailed, grpc.RpcError) as error:
        lines = str(error).splitlines()
        findings.skip(peer.title, " ".join(lines if len(lines) < 3 else (lines[0], lines[-1])))
        return None


#: Who is measured, and how: rows a second in one round.
_Turn = tuple[str, Callable[[], float]]


def _turns(
    site: Site, servers: dict[str, RunningServer], clients: LoadClients, loop: BareLoop, rows: int
) -> Iterator[_Turn]:
    x, seconds = loop.example(rows), site.effort.seconds
    message = with_bytes(_KIND, {"x": x})
    for name, one in servers.items():
        case = f"{_KIND}, batch {rows}, {name}"

        def rate(one: RunningServer = one, case: str = case) -> float:
            return clients.load(one, [message] * IN_FLIGHT, seconds, case).answers_per_s * rows

        yield name, rate
    yield _LOOP, lambda: loop.rate(x, seconds) * rows


def _compare(site: Site, findings: Findings, turns: Sequence[_Turn], rows: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name, _ in turns}
    for _ in range(site.effort.rounds):
        for name, rate in turns:
            rates[name].append(rate())
    ours = rates.pop(_OURS)
    for name, theirs in rates.items():
        details = {"gpuserve, rows/s": ours, "the other, rows/s": theirs}
        case = f"{_KIND}, batch {rows}, gpuserve / {name}"
        findings.add(ratio_figure(case, "times the rows", ours, theirs, None, **details))
